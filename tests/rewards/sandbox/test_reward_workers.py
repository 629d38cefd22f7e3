"""Workers that start once, die and are replaced, and the levels of isolation. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox import levels, pool
from comlrl.rewards.sandbox.launch import SandboxError
from comlrl.types import JointAction
from tests.support.fakes import code_task
from tests.support.processes import children, gone, python, until
from tests.support.sandbox import workers

ROOT = Path(__file__).parents[3]
ECHO = "def f(*values, **named):\n    return values[0] if values else named\n"


def actions(*programs: str) -> list[JointAction]:
    task = code_task("t", "", "def check(candidate):\n    assert candidate(2) == 4\n", "f")
    return [JointAction(task, (program,)) for program in programs]


def squares(count: int) -> list[str]:
    """Different programs: a comment alone would leave the same code."""
    return [f"def f(x):\n    return x * x + {n} - {n}\n" for n in range(count)]


def test_workers_start_once_and_are_reused():
    with CodeReward(workers=2) as reward:
        reward.score(actions(*squares(4)))
        first = {worker.process.pid for worker in workers(reward)}
        reward.score(actions(*squares(8)))
        assert first == {worker.process.pid for worker in workers(reward)} and len(first) == 2
    for pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_identical_programs_run_once(monkeypatch):
    ran = []
    finish = pool._Batch.finish
    monkeypatch.setattr(
        pool._Batch, "finish", lambda self, *reply: ran.append(reply) or finish(self, *reply)
    )
    with CodeReward(workers=1) as reward:
        scores = reward.score(actions(*squares(2), *squares(2), squares(1)[0]))
        assert len(ran) == 2
        scores += reward.score(actions(*squares(3)))
        assert len(ran) == 3  # one program more
    assert [s.value for s in scores] == [pytest.approx(2.1)] * 8


def test_an_interrupted_call_leaves_nothing_behind():
    """Replies to programs that were under way are not taken for those of the next call."""

    def interrupted():
        yield from jobs[:5]
        raise KeyboardInterrupt

    with CodeReward(workers=2) as reward:
        jobs = [reward._draft(action).job for action in actions(*squares(6))]
        with pytest.raises(KeyboardInterrupt):
            reward.pool.run(interrupted())
        wrong = "def f(x):\n    return 5\n"
        scores = reward.score(actions(wrong, *squares(3)))
    assert [s.value for s in scores] == [pytest.approx(v) for v in (1.1, 2.1, 2.1, 2.1)]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("comlrl.rewards.code.reward.CACHED", 8)
    with CodeReward(workers=1) as reward:
        for start in range(0, 40, 5):
            reward.score(actions(*squares(40)[start : start + 5]))
            assert len(reward._outcomes) <= 10


def test_long_programs_and_long_replies_do_not_wait_for_each_other():
    """Each is larger than a socket's buffer."""
    lines = "".join(f"    assert candidate({n}) == '{'x' * 500}'\n" for n in range(600))
    task = code_task("t", "", f"def check(candidate):\n{lines}", "f")
    programs = [f"def f(x):\n    return '{n}' + '\U0001f600' * 200\n" for n in range(5)]
    with CodeReward(workers=1) as reward:
        scores = reward.score([JointAction(task, (program,)) for program in programs])
    assert [len(s.facts.outcomes) for s in scores] == [600] * 5
    assert {o.actual[1] for o in scores[4].facts.outcomes} == {"4"}


def kill_at_work(worker: pool._Worker) -> None:
    """Ends a worker once it has been handed a program."""
    until(lambda: worker.jobs)
    os.kill(worker.process.pid, signal.SIGKILL)


def test_a_dead_worker_is_replaced_and_only_its_program_fails():
    """The tests' process is killed while it has a slow program to run."""
    slow = "import time\ndef f(x):\n    time.sleep(1.5)\n    return x * x\n"
    with CodeReward(workers=2) as reward:
        reward.score(actions(squares(1)[0]))
        victim = workers(reward)[0].process.pid
        killer = threading.Thread(target=kill_at_work, args=(workers(reward)[0],))
        killer.start()
        scores = reward.score(actions(slow, slow.replace("x * x", "x ** 2"), *squares(20)))
        assert workers(reward)[0].process.pid != victim
    assert sorted(s.value for s in scores[:2]) == [pytest.approx(1.1), pytest.approx(2.1)]
    died = next(s for s in scores[:2] if s.value < 2).facts.outcomes[0]
    assert died.error_type == "Died"
    assert all(s.value == pytest.approx(2.1) for s in scores[2:])


def test_a_program_whose_judge_was_killed_runs_again():
    slow = "import time\ndef f(x):\n    time.sleep(1.5)\n    return x * x\n"
    with CodeReward(workers=1) as reward:
        reward.score(actions(squares(1)[0]))
        killer = threading.Thread(target=kill_at_work, args=(workers(reward)[0],))
        killer.start()
        first = reward.score(actions(slow))[0]
        assert first.facts.outcomes[0].error_type == "Died"
        assert reward.score(actions(slow))[0].value == pytest.approx(2.1)


def test_a_worker_that_does_not_start_leaves_no_others(monkeypatch):
    """The next call starts all of them."""
    ready, started = pool._Worker.await_ready, []

    def fail_second(self):
        started.append(self)
        if len(started) == 2:
            self.close()
            raise SandboxError("none")
        ready(self)

    monkeypatch.setattr(pool._Worker, "await_ready", fail_second)
    with CodeReward(workers=2) as reward:
        with pytest.raises(SandboxError):
            reward.score(actions(*squares(3)))
        assert workers(reward) == []
        assert reward.score(actions(*squares(3)))[2].value == pytest.approx(2.1)
        assert len(started) == 4


def test_a_dead_sandbox_is_replaced_unnoticed():
    with CodeReward(workers=1) as reward:
        reward.score(actions(squares(1)[0]))
        judge = workers(reward)[0].process.pid
        interpreters = children(judge)
        for pid in interpreters:
            os.kill(pid, signal.SIGKILL)
        until(lambda: gone(interpreters))
        assert reward.score(actions(*squares(3)))[2].value == pytest.approx(2.1)
        assert workers(reward)[0].process.pid == judge


def test_a_test_that_never_ends_ends_its_worker_alone():
    """A C loop in a test cannot be interrupted; the CPU clock ends the tests' process."""
    endless = code_task(
        "t", "", "def check(candidate):\n    assert sum(range(10**12)) == candidate(1)\n", "f"
    )
    with CodeReward(workers=2, timeout=0.7) as reward:
        scores = reward.score([JointAction(endless, (ECHO,)), *actions(*squares(10))])
    assert scores[0].facts.outcomes[0].error_type == "Died"
    assert all(s.value == pytest.approx(2.1) for s in scores[1:])


def test_scoring_from_threads():
    values = []
    with CodeReward(workers=2) as reward:
        threads = [
            threading.Thread(
                target=lambda n=n: values.extend(reward.score(actions(*squares(10 + n))))
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [v.value for v in values] == [pytest.approx(2.1)] * (10 + 11 + 12 + 13)


def test_nothing_starts_before_the_first_score():
    reward = CodeReward(workers=2)
    assert workers(reward) == []
    reward.close()
    assert reward.score([]) == [] and workers(reward) == []


def test_workers_end_with_the_trainer():
    """The trainer is killed without a chance to clean up."""
    program = """
import os, sys
from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction, Task
reward = CodeReward(workers=2)
fields = {"prompt": "", "test": "def check(c):\\n    assert c(1) == 1", "entry_point": "f"}
task = Task("t", fields)
reward.score([JointAction(task, ("def f(x): return x",))])
print(*[worker.process.pid for worker in reward.pool.workers], flush=True)
os.kill(os.getpid(), 9)
"""
    pids = [int(pid) for pid in python("-c", program, code=-signal.SIGKILL).stdout.split()]
    assert len(pids) == 2
    until(lambda: gone(pids))


def test_workers_import_nothing_heavy():
    program = "import sys; import comlrl.rewards.sandbox.judge; print(*sys.modules)"
    loaded = python("-S", "-c", program).stdout.split()
    modules = {name.partition(".")[0] for name in loaded}
    assert modules <= set(sys.stdlib_module_names) | {"comlrl", "__main__"}


# --- levels of isolation -----------------------------------------------------------------------


def test_unknown_isolation_is_named():
    with pytest.raises(
        SandboxError, match=r"sandbox\.isolation: 'docker'; use one of auto, namespaces"
    ):
        _ = CodeReward(isolation="docker").isolation


@pytest.fixture
def without_namespaces(monkeypatch):
    """A machine that offers neither bubblewrap nor user namespaces."""
    failure = {"bubblewrap": "bubblewrap is not installed", "unshare": "unshare: not permitted"}.get
    monkeypatch.setattr(levels, "failure", failure)
    monkeypatch.setattr(pool, "failure", failure)
    monkeypatch.setattr(pool, "missing", lambda level: ("Landlock's rules on files",))


def test_namespaces_are_refused_by_name(without_namespaces):
    with pytest.raises(
        SandboxError, match=r"sandbox\.isolation: namespaces .*bubblewrap is not installed"
    ):
        _ = CodeReward(isolation="namespaces").isolation


def test_limits_alone_warn_once(without_namespaces, capfd):
    with CodeReward(workers=1) as reward:
        assert reward.score(actions(*squares(1)))[0].facts.isolation == "limits"
        assert reward.score(actions(*squares(1)))[0].facts.isolation == "limits"
    message = "warning: .*without namespaces.*apt.*dnf.*conda.*without Landlock"
    assert len(re.findall(message, capfd.readouterr().err)) == 1


def test_limits_that_were_asked_for_do_not_warn(without_namespaces, monkeypatch, capfd):
    """But of what is missing there."""
    assert CodeReward(isolation="limits").isolation == "limits"
    assert "runs without Landlock" in capfd.readouterr().err
    monkeypatch.setattr(pool, "missing", lambda level: ())
    assert CodeReward(isolation="limits").isolation == "limits"
    assert not capfd.readouterr().err


@pytest.mark.parametrize("level", levels.LEVELS)
def test_every_level_gives_the_same_score(level):
    if levels.failure(level) is not None:
        pytest.skip(f"{level} is not offered here: {levels.failure(level)}")
    program = "import json, statistics\ndef f(x):\n    return int(statistics.mean([x * x]))\n"
    with CodeReward(workers=1, isolation=level) as reward:
        assert reward.score(actions(program))[0].value == pytest.approx(2.1)
        assert reward.isolation == level


# What shows, without a line of ours, whether this machine's kernel lets a plain user do it.
PROBES = {
    "bubblewrap": "bwrap --unshare-pid --unshare-net --ro-bind / / true",
    "unshare": "unshare --user --mount --pid --net --fork true",
    "limits": "true",
}


# Which of these a program may do to the user's own things; CANARY, PARENT and MEMORY are filled in.
REACH = """
import ctypes, fcntl, os
def f(x):
    libc, reached = ctypes.CDLL(None), []
    libc.shmat.restype = ctypes.c_void_p
    def attach():
        if libc.shmat(MEMORY, None, 0) in (None, 2 ** 64 - 1): raise OSError
    tries = [
        lambda: open("CANARY").close(), lambda: open("CANARY", "r+").close(),
        lambda: os.close(os.open("CANARY", os.O_RDONLY | os.O_TRUNC)),
        lambda: os.chmod("CANARY", 0o600), lambda: os.utime("CANARY"),
        lambda: os.rename("CANARY", "CANARY.x"), lambda: open("/proc/PARENT/environ").read(1),
        lambda: os.kill(PARENT, 0), lambda: fcntl.fcntl(os.pipe()[0], 8, PARENT), attach,
    ]
    for number, attempt in enumerate(tries):
        try: attempt()
        except OSError: continue
        reached.append(number)
    return reached
"""
BY_A_PLAIN_USER = """
import ctypes, os, sys, tempfile
if sys.version_info < (3, 10): sys.exit("skip: the system's Python is too old")
if not os.access(ROOT, os.X_OK): sys.exit("skip: the repository is out of others' reach")
if os.system(PROBE): sys.exit("skip: a plain user may not start this level here")
sys.path.insert(0, ROOT)
from comlrl.types import JointAction, Task
from comlrl.rewards.code.reward import CodeReward
libc = ctypes.CDLL(None)
memory = libc.shmget(0, 4096, 0o1600)
with tempfile.NamedTemporaryFile("w") as canary, CodeReward(1, 2.0, 256, LEVEL) as reward:
    canary.write("here")
    canary.flush()
    reach = REACH.replace("CANARY", canary.name).replace("PARENT", str(os.getpid()))
    reach = reach.replace("MEMORY", str(memory))
    def score(text, test):
        test = "def check(candidate):\\n    assert " + test
        task = Task("t", {"prompt": "", "test": test, "entry_point": "f"})
        return reward.score([JointAction(task, (text,))])[0]
    texts = ["def f(x):\\n    return x * x + %d - %d\\n" % (n, n) for n in range(3)]
    texts[1:1] = ["def f(x):\\n    while True: pass\\n    return x\\n"]
    print("honest", [round(score(text, "candidate(3) == 9").value, 3) for text in texts])
    (outcome,) = score(reach, "candidate(3) == []").facts.outcomes
    print("reached", outcome.actual if outcome.error_type else [], outcome.message)
    canary.seek(0, 2)
    print("left", canary.tell(), os.stat(canary.name).st_size)
    names = {}
    exec(reach, names)
    print("control", len(names["f"](3)))  # without a sandbox
    os.rename(canary.name + ".x", canary.name)
libc.shmctl(memory, 0, None)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("level", levels.LEVELS)
def test_every_level_holds_for_a_user_without_rights(level):
    """Started by a plain user: honest programs are right, and what is that user's own is kept."""
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs a Python that others can reach")
    given = {"ROOT": str(ROOT), "PROBE": PROBES[level], "LEVEL": level, "REACH": REACH}
    values = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    done = subprocess.run(
        ["/usr/bin/python3", "-S", "-B", "-c", f"{values}\n{BY_A_PLAIN_USER}"],
        capture_output=True, text=True, check=False, cwd="/",
        user=65534, group=65534, extra_groups=[],
    )  # fmt: skip
    if "skip: " in done.stderr:
        pytest.skip(done.stderr)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["honest [2.1, 1.1, 2.1, 2.1]"], done.stderr
    assert lines[1:] == ["reached [] None", "left 4 4", "control 10"], done.stderr


def test_no_directory_is_left(tmp_path, monkeypatch):
    """Neither of a closed worker, nor of one that was killed, nor however deep."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = "import os\ndef f(x):\n    for _ in range(3000):\n        os.mkdir('d'); os.chdir('d')\n"
    deep += "    os.chmod('.', 0)\n    return x * x\n"
    with CodeReward(workers=2, isolation="limits") as reward:
        assert reward.score(actions(deep, *squares(3)))[3].value == pytest.approx(2.1)
        os.kill(workers(reward)[0].process.pid, signal.SIGKILL)
        assert reward.score(actions(*squares(6)))[5].value == pytest.approx(2.1)
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []
