"""What a program may use and reach: time in all, files, locks, sockets. Real attacks, at every
level that this machine has, each with a control that fails if the attack could not work at all."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox import folders, launch
from comlrl.rewards.sandbox.inside.confine import SCRATCH_FILES
from comlrl.rewards.sandbox.launch import Limits, Sandbox
from comlrl.rewards.sandbox.levels import failure
from comlrl.types import JointAction
from tests.support.fakes import code_task
from tests.support.sandbox import workers

ROOT = Path(__file__).parents[3]
HONEST = "def f(x):\n    return x * x + {0} - {0}\n"


def score(reward: CodeReward, program: str, *checks: str):
    test = "def check(candidate):\n" + "".join(f"    assert {check}\n" for check in checks)
    return reward.score([JointAction(code_task("t", "", test, "f"), (program,))])[0]


def outcomes(reward: CodeReward, program: str, *checks: str):
    return score(reward, program, *checks).facts.outcomes


# --- time --------------------------------------------------------------------------------------


def test_all_tests_of_a_program_have_three_timeouts_together(level):
    """Each is within its own time; what is not run by then counts as failed."""
    slow = "import time\ndef f(x):\n    time.sleep(0.8)\n    return x\n"
    with CodeReward(1, 1.0, 256, level) as reward:
        found = outcomes(reward, slow, *[f"candidate({x}) == {x}" for x in range(12)])
        assert score(reward, HONEST.format(0), "candidate(3) == 9").value == pytest.approx(2.1)
    assert sum(outcome.passed for outcome in found) <= 3
    assert {o.error_type for o in found if not o.passed} <= {"Timeout", "NotRun"}
    assert [o.error_type for o in found[4:]] == ["NotRun"] * 8
    assert found[-1].message == "not run: the 3 s for all tests of a program were over"


def test_transport_and_printing_of_values_take_of_the_programs_time(level):
    """Values that take longer to read and to print than to make, each within its test's time."""
    large = "def f(x, made=[]):\n    made += [] if made else [(1,)] * 50_000\n    return made\n"
    with CodeReward(1, 1.0, 512, level) as reward:
        found = outcomes(reward, large, *[f"candidate({x}) == {x}" for x in range(80)])
    assert found[-1].error_type == "NotRun"


# --- memory ------------------------------------------------------------------------------------


def test_a_program_may_be_granted_more_memory_than_its_judge(level):
    program = "import resource\ndef f(x):\n    return resource.getrlimit(resource.RLIMIT_AS)\n"
    with CodeReward(1, 5.0, 8192, level) as reward:
        (found,) = outcomes(reward, program, f"candidate(0) == ({8192 << 20},) * 2")
    assert found.passed, found


# --- files -------------------------------------------------------------------------------------

MANY = """
import os
def f(x):
    for number in range(20_000):
        try: os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
        except OSError: return number
    return 20_000
"""
SIZE = "import os\ndef f(x):\n    return os.stat('.').st_size\n"


def test_very_many_files_are_refused_or_slow_down_no_one(level):
    with CodeReward(1, 30.0, 256, level) as reward:
        (found,) = outcomes(reward, MANY, "candidate(0) == -1")
        assert (int(found.actual) < SCRATCH_FILES) == (level != "limits")
        (found,) = outcomes(reward, SIZE, "candidate(0) < 60_000")
        assert found.passed, found  # a disk's directory stays large when its files are gone
        assert score(reward, HONEST.format(0), "candidate(3) == 9").value == pytest.approx(2.1)


def test_bubblewrap_without_the_right_to_mount_says_what_is_missing(monkeypatch, tmp_path):
    """As it is where bwrap is installed setuid and another user than root starts it."""
    if failure("bubblewrap") is not None:
        pytest.skip(f"not offered here: {failure('bubblewrap')}")
    command = launch.bubblewrap_command("/dev/null")
    position = command.index("CAP_SYS_ADMIN")
    with_bound = Sandbox("bubblewrap", Limits(1.0, 256), str(tmp_path))
    monkeypatch.setattr(
        launch, "bubblewrap_command", lambda _: command[: position - 1] + command[position + 1 :]
    )
    without = Sandbox("bubblewrap", Limits(1.0, 256), str(tmp_path))
    with_bound.close()
    without.close()
    assert not any("number of files" in line for line in with_bound.missing)
    assert any("number of files" in line for line in without.missing)


def test_a_setuid_bubblewrap_of_a_plain_user_is_not_asked_for_rights(monkeypatch, tmp_path):
    """It refuses to start then."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("")
    bwrap.chmod(0o4755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for user, asked in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        assert ("CAP_SYS_ADMIN" in launch.bubblewrap_command("/dev/null")) == asked
    bwrap.chmod(0o755)
    assert "CAP_SYS_ADMIN" in launch.bubblewrap_command("/dev/null")


# --- sockets -----------------------------------------------------------------------------------

SEND = """
import socket
def f(path):
    reached = []
    def named(kind, send):
        with socket.socketpair(socket.AF_UNIX, kind)[0] as ours: send(ours)
    for name, kind, send in (
        ("pair of datagrams", socket.SOCK_DGRAM, lambda ours: None),
        ("sendto", socket.SOCK_DGRAM, lambda ours: ours.sendto(b"x", path)),
        ("sendmsg", socket.SOCK_DGRAM, lambda ours: ours.sendmsg([b"x"], [], 0, path)),
        ("connect", socket.SOCK_DGRAM, lambda ours: ours.connect(path)),
        ("bind", socket.SOCK_STREAM, lambda ours: ours.bind("\\0comlrl-walls")),
        ("pair of packets", socket.SOCK_SEQPACKET, lambda ours: None),
    ):
        try: named(kind, send)
        except OSError: continue
        reached.append(name)
    return reached
"""


def test_no_socket_outside_is_reached(level):
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside,
    ):
        os.chmod(folder, 0o755)
        path = f"{folder}/socket"
        outside.bind(path)
        os.chmod(path, 0o777)
        outside.setblocking(False)
        with CodeReward(1, 2.0, 256, level) as reward:
            (found,) = outcomes(reward, SEND, f"candidate({path!r}) == []")
        assert found.passed, found
        with pytest.raises(BlockingIOError):
            outside.recv(1)
        names: dict = {}
        exec(SEND, names)
        assert len(names["f"](path)) == 6  # the control: without a sandbox
        assert [outside.recv(1), outside.recv(1)] == [b"x", b"x"]


def test_an_event_loop_has_its_own_pair_of_sockets(level):
    """asyncio wakes itself through one: connected, and of no use outside."""
    program = "import asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x * x\n"
    program += "def f(x):\n    return asyncio.run(later(x))\n"
    with CodeReward(1, 5.0, 512, level) as reward:
        assert score(reward, program, "candidate(3) == 9").value == pytest.approx(2.1)


# --- neighbours --------------------------------------------------------------------------------

LOCKS = """
import ctypes, fcntl, os, struct
def f(x):
    found = []
    for path in (os.__file__, "/dev/null"):
        file = os.open(path, os.O_RDONLY)
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
        for attempt in (
            lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
            lambda: fcntl.flock(file, fcntl.LOCK_UN),
            *(lambda command=command: fcntl.fcntl(file, command, lock) and None
              for command in (fcntl.F_GETLK, fcntl.F_SETLK, 36, 37)),
        ):
            try: found.append(attempt())
            except OSError as error: found.append(error.errno)
        os.close(file)
    return found
"""
WAKE = """
import ctypes, os
def f(x):
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    file = os.open(os.__file__, os.O_RDONLY)
    page = libc.mmap(None, 4096, 1, 1, file, 0)
    return libc.syscall(NUMBER, ctypes.c_void_p(page), 1, 1, None, None, 0)
"""


def run_plainly(program: str):
    names: dict = {}
    exec(program, names)
    return names["f"](0)


def test_no_lock_of_a_neighbours_is_seen(level):
    """On files that every sandbox shows: alone, and beside a process that holds the locks."""
    with CodeReward(1, 2.0, 256, level) as reward, contextlib.ExitStack() as files:
        alone = outcomes(reward, LOCKS, "candidate(0) == 0")[0].actual
        assert alone == repr([1] * 12)  # EPERM
        free = run_plainly(LOCKS)
        for path in (os.__file__, "/dev/null"):
            file = files.enter_context(open(path))
            fcntl.flock(file, fcntl.LOCK_EX)
        assert run_plainly(LOCKS) != free  # the control
        beside = outcomes(reward, LOCKS, "candidate(0) == 1")[0].actual
    assert beside == alone


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of calls")
def test_no_neighbour_that_waits_on_a_page_is_woken(level):
    number = {"x86_64": 202, "aarch64": 98}[platform.machine()]
    wake = WAKE.replace("NUMBER", str(number))
    waiting = threading.Thread(target=wait_on_the_page, args=(number,), daemon=True)
    waiting.start()
    with CodeReward(1, 2.0, 256, level) as reward:
        (found,) = outcomes(reward, wake, "candidate(0) == -1")
    assert found.passed, found
    while not run_plainly(wake):  # the control: it waits, and could be woken
        pass
    waiting.join()


def wait_on_the_page(number: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    with open(os.__file__, "rb") as file:
        page = libc.mmap(None, 4096, 1, 1, file.fileno(), 0)
        value = int.from_bytes(file.read(4), "little")
    libc.syscall(number, ctypes.c_void_p(page), 0, value, None, None, 0)


def test_sandboxes_of_one_process_do_not_kill_each_other(monkeypatch):
    """As root without namespaces, where Landlock does not restrict signals (before Linux 6.12)."""
    bootstrap = launch._bootstrap
    unscoped = ("scopes = 3 if", "scopes = 0 if")
    monkeypatch.setattr(launch, "_bootstrap", lambda config: bootstrap(config).replace(*unscoped))
    folder, lock = folders.claim()
    sandboxes = [Sandbox("limits", Limits(1.0, 256), folder) for _ in range(2)]
    statuses = []
    for sandbox in sandboxes:  # each has killed programs, to warm up
        sandbox.kill()
        statuses.append(sandbox.wait_killed())
        sandbox.close()
    folders.remove_tree(folder)
    os.close(lock)
    assert statuses == [0, 0]


# --- what killed runs leave --------------------------------------------------------------------

KILLED = """
import os, sys
from comlrl.types import JointAction, Task
from comlrl.rewards.code.reward import CodeReward
fields = {"prompt": "", "test": "def check(c):\\n    assert c(1) == 1", "entry_point": "f"}
reward = CodeReward(workers=2, isolation=sys.argv[1])
reward.score([JointAction(Task("t", fields), ("def f(x): return x",))])
for worker in reward.pool.workers:
    os.kill(worker.process.pid, 9)
os.kill(os.getpid(), 9)
"""


def test_the_next_run_sweeps_what_killed_ones_left(level, tmp_path, monkeypatch):
    """And leaves what others use, and what is not a folder of ours."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", KILLED, level]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.glob("comlrl-sandbox-*"))) == 2
    for left in tmp_path.glob("comlrl-sandbox-*/lock"):
        with left.open("r+") as lock_file:  # its workers end a moment after it
            fcntl.flock(lock_file, fcntl.LOCK_EX)
    (tmp_path / "comlrl-sandbox-empty").mkdir()
    (tmp_path / "comlrl-sandbox-file").write_text("")
    (tmp_path / "comlrl-sandbox-other").mkdir()
    (tmp_path / "comlrl-sandbox-other" / "work").write_text("")
    (tmp_path / "comlrl-sandbox-link").symlink_to(tmp_path / "comlrl-sandbox-other")
    foreign = {f"comlrl-sandbox-{name}" for name in ("file", "other", "link")}
    claimed, lock = folders.claim()
    with CodeReward(1, 2.0, 256, level) as first:
        score(first, HONEST.format(0), "candidate(3) == 9")
        used = {Path(claimed).name, Path(workers(first)[0].directory).name}
        assert {path.name for path in tmp_path.iterdir()} == foreign | used
        with CodeReward(1, 2.0, 256, level) as second:
            score(second, HONEST.format(0), "candidate(3) == 9")
            assert used < {path.name for path in tmp_path.iterdir()}
        sandboxed = score(first, HONEST.format(1), "candidate(3) == 9")
        assert sandboxed.value == pytest.approx(2.1)
    os.close(lock)
    folders.sweep()
    assert {path.name for path in tmp_path.iterdir()} == foreign
