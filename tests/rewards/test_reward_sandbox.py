"""The stand-in, the workers and the levels of isolation, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl.types import JointAction, Task
from rewards.code_rewards import CodeReward
from rewards.sandbox import launch, pool, wire
from rewards.sandbox.launch import SandboxError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reward():
    with CodeReward(workers=2, timeout=1.0) as reward:
        yield reward


def outcomes(reward, program: str, *checks: str):
    """Outcomes of a program for ``f`` against the statements of a check."""
    body = "".join(f"    {line}\n" for check in checks for line in check.split("\n"))
    task = Task("t", "", f"def check(candidate):\n{body}", "f")
    return reward.score([JointAction(task, (program,))])[0].breakdown.outcomes


ECHO = "def f(*values, **named):\n    return values[0] if values else named\n"


# --- plain values ------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False), st.text(st.characters()), st.binary(),
)  # fmt: skip
HASHABLE = st.recursive(
    ATOMS, lambda s: st.one_of(st.tuples(s, s), st.frozensets(s, max_size=3)), max_leaves=5
)
PLAIN = st.recursive(
    HASHABLE,
    lambda s: st.one_of(
        st.lists(s, max_size=4),
        st.lists(s, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, s, max_size=4),
        st.sets(HASHABLE, max_size=4),
    ),
    max_leaves=12,
)


def exactly(value):
    """A value with all its types, comparable."""
    if isinstance(value, dict):
        return dict, [(exactly(k), exactly(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exactly(v) for v in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(exactly, value)))
    return type(value), repr(value)


@given(PLAIN)
@settings(max_examples=300, deadline=None)
def test_plain_values_travel_unchanged(value):
    assert exactly(wire.loads(wire.dumps(value))) == exactly(value)


@given(st.binary(max_size=200) | PLAIN.map(lambda v: json.dumps(repr(v)).encode()))
@settings(max_examples=300, deadline=None)
def test_reading_raises_nothing_but_value_errors(payload):
    with contextlib.suppress(ValueError):
        wire.loads(payload)


@pytest.mark.parametrize(
    "payload",
    [b'{"t":1}', b'{"x":[]}', b'{"t":[],"s":[]}', b'{"d":[1]}', b'{"s":[[1]]}', b'{"n":"zz"}',
     b'{"b":"0"}', b'{"c":["a","b"]}', b'{"d":[[1],2]}', b"[" * 100_000, b"9" * 100_000, b"{}",
     b'{"i":[1,2]}', b'{"n":16}'],
    ids=range(14),
)  # fmt: skip
def test_malformed_payloads(payload):
    with pytest.raises(ValueError, match="not a plain value"):
        wire.loads(payload)


def test_large_integers_are_not_limited_to_4300_digits():
    value = 7**20_000  # 16,902 digits
    assert wire.loads(wire.dumps([value, -value])) == [value, -value]


# --- the stand-in ------------------------------------------------------------------------------


def test_types_come_back_plain(reward):
    program = """
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum
def f(kind):
    class Color(IntEnum):
        RED = 3
    return {
        "counter": Counter("aab"),
        "ordered": OrderedDict(a=1),
        "point": namedtuple("Point", "x y")(1, 2),
        "enum": Color.RED,
        "set": {1, 2},
        "nested": [(1, {2: b"x"}), frozenset([None]), 1j],
    }[kind]
"""
    results = outcomes(
        reward,
        program,
        "assert candidate('counter') == {'a': 2, 'b': 1} and type(candidate('counter')) is dict",
        "assert type(candidate('ordered')) is dict",
        "assert candidate('point') == (1, 2) and type(candidate('point')) is tuple",
        "assert type(candidate('enum')) is int",
        "assert candidate('set') == {2, 1}",
        "assert candidate('nested') == [(1, {2: b'x'}), frozenset([None]), 1j]",
    )
    assert all(outcome.passed for outcome in results), results


def test_iterators_come_back_bounded(reward):
    program = "import itertools\ndef f(kind):\n"
    program += "    return (x * x for x in range(3)) if kind else itertools.count()\n"
    first, second, third = outcomes(
        reward,
        program,
        "assert list(candidate(1)) == [0, 1, 4]",
        "assert next(candidate(0)) == 0",
        "assert list(candidate(0)) == []",
    )
    assert first.passed and second.passed and not third.passed
    assert third.error_type == "Unsupported"


def test_exceptions_come_back_as_the_builtin_of_their_name(reward):
    program = """
def f(kind):
    class Odd(KeyError): pass
    if kind: raise Odd("missing", 3)
    return {}[7]
"""
    results = outcomes(
        reward,
        program,
        "try:\n    candidate(1)\nexcept KeyError as e:\n    assert e.args == ('missing', 3)",
        "try:\n    candidate(0)\nexcept KeyError as e:\n    assert str(e) == '7'",
        "assert candidate(0) == 1",
    )
    assert [outcome.passed for outcome in results] == [True, True, False]
    assert (results[2].error_type, results[2].message) == ("KeyError", "7")
    # the program begins with the function: its return is the fourth line
    assert results[2].line == 4


def test_changed_arguments_are_copied_back(reward):
    program = """
def f(values, other=None):
    values.sort(); values.append({"new": 1})
    if other is not None: other["key"][0].add(9); del other["gone"]
    return values
"""
    results = outcomes(
        reward,
        program,
        "a = [3, 1, 2]\nalias = a\nr = candidate(a)",
        "assert r is a and alias == [1, 2, 3, {'new': 1}] and candidate",
        "inner = {1}\nd = {'gone': 0, 'key': [inner]}\nr = candidate([], other=d)",
        "assert d == {'key': [{1, 9}]} and d['key'][0] is inner and candidate",
    )
    assert [outcome.passed for outcome in results] == [True, True]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("candidate(len)", "builtin_function_or_method"),
        ("candidate(lambda x: x)", "function"),
        ("candidate([object()])", "object"),
        ("candidate(range(3))", "range"),
    ],
)
def test_unsupported_arguments_are_named(reward, call, says):
    # a test that catches everything cannot take it for the program's own error
    for check in (
        f"assert {call} == 1",
        f"try:\n    assert {call}\nexcept BaseException:\n    pass",
    ):
        (outcome,) = outcomes(reward, ECHO, check)
        assert (
            not outcome.passed and outcome.error_type == "Unsupported" and says in outcome.message
        )


def test_set_up_runs_in_order_and_its_failure_is_told(reward):
    program = "def f(x):\n    if x == 1: raise ValueError('one')\n    return x\n"
    results = outcomes(
        reward,
        program,
        "import math",
        "a = candidate(1)",
        "assert a == 1",
        "assert candidate(2) == math.floor(2.5)",
        "a = candidate(3)",
        "assert a == 3",
    )
    assert [outcome.passed for outcome in results] == [False, True, True]
    assert (results[0].error_type, results[0].message) == ("ValueError", "one")


def test_the_tests_names_do_not_reach_the_prompts_helpers(reward):
    """HumanEval 38 binds `str` in check; a helper of the prompt that uses str keeps the builtin."""
    prompt = "def show(x):\n    return str(x)\n\ndef f(x):\n    '''Doc.'''\n"
    test = "def check(candidate):\n    str = 'mine'\n    assert candidate(1) == show(1)\n"
    score = reward.score(
        [JointAction(Task("t", prompt, test, "f"), ("def f(x):\n    return show(x)\n",))]
    )
    assert score[0].value == pytest.approx(2.1)


def test_expected_and_actual_values(reward):
    cases = {
        "assert candidate(1) == 2": ("2", "1"),
        "assert 2 == candidate(1)": ("2", "1"),
        "assert not candidate(1)": ("False", "1"),
        "assert candidate('')": ("True", "''"),
        "assert abs(candidate(1) - 3) < 1": (None, "1"),
        "for x in (1, 2):\n    assert candidate(x) == 1": ("1", "2"),
        "assert candidate('x' * 1000) == 1": ("1", "'" + "x" * 198 + "…"),
    }
    for check, values in cases.items():
        (outcome,) = outcomes(reward, ECHO, check)
        assert (outcome.expected, outcome.actual) == values, check


def test_each_test_has_its_own_time_and_three_timeouts_end_it(reward):
    program = (
        "import time\ndef f(x):\n    time.sleep(60 if x in (1, 3, 4) else 0.4)\n    return x\n"
    )
    checks = [f"assert candidate({x}) == {x}" for x in (1, 2, 3, 5, 6, 7, 4, 8)]
    results = outcomes(reward, program, *checks)
    # 0.4 s each are within the second of each test; the third timeout leaves the last one unrun
    assert [o.passed for o in results] == [False, True, False, True, True, True, False, False]
    assert [o.timed_out for o in results] == [True, False, True, False, False, False, True, False]
    assert results[-1].error_type == "NotRun"


def test_a_process_that_ended_is_started_again_for_the_next_test(reward):
    program = "import os\ndef f(x):\n    if x == 1: os._exit(3)\n    return x\n"
    results = outcomes(reward, program, *[f"assert candidate({x}) == {x}" for x in (0, 1, 2)])
    assert [o.passed for o in results] == [True, False, True]
    assert results[1].error_type == "Exited" and "3" in results[1].message


def test_scratch_is_empty_and_usable(reward):
    program = """
import os
def f():
    names = os.listdir(".")
    open("file", "w").write("x")
    os.makedirs("a/b")
    return names
"""
    for extra in range(3):
        (outcome,) = outcomes(reward, program + f"# {extra}", "assert candidate() == []")
        assert outcome.passed, outcome


# --- workers -----------------------------------------------------------------------------------


def actions(*programs: str) -> list[JointAction]:
    task = Task("t", "", "def check(candidate):\n    assert candidate(2) == 4\n", "f")
    return [JointAction(task, (program,)) for program in programs]


def squares(count: int) -> list[str]:
    """Different programs: a comment alone would leave the same code."""
    return [f"def f(x):\n    return x * x + {n} - {n}\n" for n in range(count)]


def test_workers_start_once_and_are_reused():
    with CodeReward(workers=2) as reward:
        reward.score(actions(*squares(4)))
        first = {worker.process.pid for worker in reward._pool._workers}
        reward.score(actions(*squares(8)))
        assert first == {worker.process.pid for worker in reward._pool._workers} and len(first) == 2
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
            reward._pool.run(interrupted())
        wrong = "def f(x):\n    return 5\n"
        scores = reward.score(actions(wrong, *squares(3)))
    assert [s.value for s in scores] == [pytest.approx(v) for v in (1.1, 2.1, 2.1, 2.1)]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("rewards.code_rewards.CACHED", 8)
    with CodeReward(workers=1) as reward:
        for start in range(0, 40, 5):
            reward.score(actions(*squares(40)[start : start + 5]))
            assert len(reward._outcomes) <= 10


def test_a_dead_worker_is_replaced_and_only_its_program_fails():
    """The tests' process is killed while it runs the third program."""
    slow = "import time\ndef f(x):\n    time.sleep(1.5)\n    return x * x\n"
    with CodeReward(workers=2) as reward:
        reward.score(actions(squares(1)[0]))
        victim = reward._pool._workers[0].process.pid
        killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
        killer.start()
        scores = reward.score(actions(slow, slow.replace("x * x", "x ** 2"), *squares(20)))
        assert reward._pool._workers[0].process.pid != victim
    assert sorted(s.value for s in scores[:2]) == [pytest.approx(1.1), pytest.approx(2.1)]
    died = next(s for s in scores[:2] if s.value < 2).breakdown.outcomes[0]
    assert died.error_type == "Died"
    assert all(s.value == pytest.approx(2.1) for s in scores[2:])


def test_a_dead_sandbox_is_replaced_unnoticed():
    with CodeReward(workers=1) as reward:
        reward.score(actions(squares(1)[0]))
        judge = reward._pool._workers[0].process.pid
        children = Path(f"/proc/{judge}/task/{judge}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        time.sleep(0.2)
        assert reward.score(actions(*squares(3)))[2].value == pytest.approx(2.1)
        assert reward._pool._workers[0].process.pid == judge


def test_a_test_that_never_ends_ends_its_worker_alone():
    """A C loop in a test cannot be interrupted; the CPU clock ends the tests' process."""
    endless = Task(
        "t", "", "def check(candidate):\n    assert sum(range(10**12)) == candidate(1)\n", "f"
    )
    with CodeReward(workers=2, timeout=0.2) as reward:
        scores = reward.score([JointAction(endless, (ECHO,)), *actions(*squares(10))])
    assert scores[0].breakdown.outcomes[0].error_type == "Died"
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
    assert reward._pool._workers == []
    reward.close()
    assert reward.score([]) == [] and reward._pool._workers == []


def test_workers_end_with_the_trainer():
    """The trainer is killed without a chance to clean up."""
    program = """
import os, sys
from rewards.code_rewards import CodeReward
from comlrl.types import JointAction, Task
reward = CodeReward(workers=2)
task = Task("t", "", "def check(c):\\n    assert c(1) == 1", "f")
reward.score([JointAction(task, ("def f(x): return x",))])
print(*[worker.process.pid for worker in reward._pool._workers], flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_import_nothing_heavy():
    program = "import sys; import rewards.sandbox.judge; print(*sys.modules)"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in done.stdout.split()}
    assert "rewards" in modules
    assert modules <= set(sys.stdlib_module_names) | {"rewards", "__main__"}


# --- levels of isolation -----------------------------------------------------------------------


def test_unknown_isolation_is_named():
    with pytest.raises(
        SandboxError, match=r"sandbox\.isolation: 'docker' is none of auto, namespaces"
    ):
        _ = CodeReward(isolation="docker").isolation


@pytest.fixture
def without_namespaces(monkeypatch):
    """A machine that offers neither bubblewrap nor user namespaces."""
    failure = {"bubblewrap": "bubblewrap is not installed", "unshare": "unshare: not permitted"}.get
    monkeypatch.setattr(launch, "failure", failure)
    monkeypatch.setattr(pool, "failure", failure)
    monkeypatch.setattr(pool, "_warned", False)


def test_namespaces_are_refused_by_name(without_namespaces):
    with pytest.raises(
        SandboxError, match=r"sandbox\.isolation: namespaces .*bubblewrap is not installed"
    ):
        _ = CodeReward(isolation="namespaces").isolation


def test_limits_alone_warn_once(without_namespaces):
    with pytest.warns(RuntimeWarning, match="without namespaces") as seen:
        with CodeReward(workers=1) as reward:
            assert reward.score(actions(*squares(1)))[0].breakdown.isolation == "limits"
        assert CodeReward(workers=1).isolation == "limits"
    assert len(seen) == 1


def test_limits_that_were_asked_for_do_not_warn(without_namespaces):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CodeReward(isolation="limits").isolation == "limits"


@pytest.mark.parametrize("level", launch.LEVELS)
def test_every_level_gives_the_same_score(level):
    if launch.failure(level) is not None:
        pytest.skip(f"{level} is not offered here: {launch.failure(level)}")
    program = "import json, statistics\ndef f(x):\n    return int(statistics.mean([x * x]))\n"
    with CodeReward(workers=1, isolation=level) as reward:
        assert reward.score(actions(program))[0].value == pytest.approx(2.1)
        assert reward.isolation == level


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("level", launch.LEVELS)
def test_every_level_works_for_a_user_without_rights(level, tmp_path):
    """The levels that a plain user can start, started by one."""
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)
from rewards.sandbox.launch import Limits, Sandbox
sandbox = Sandbox({level!r}, Limits(1.0, 512))
sandbox.kill()
print("status", sandbox.wait_killed())
sandbox.close()
"""
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs a Python that others can reach")
    done = subprocess.run(
        ["/usr/bin/python3", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    if "SyntaxError" in done.stderr or "Permission denied: '/" in done.stderr:
        pytest.skip("the system's Python is too old, or the repository is out of its reach")
    assert "status 0" in done.stdout, done.stderr


def test_no_directory_is_left(tmp_path, monkeypatch):
    """Neither of a closed worker, nor of one that was killed, nor however deep."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = "import os\ndef f(x):\n    for _ in range(3000):\n        os.mkdir('d'); os.chdir('d')\n"
    deep += "    os.chmod('.', 0)\n    return x * x\n"
    with CodeReward(workers=2, isolation="limits") as reward:
        assert reward.score(actions(deep, *squares(3)))[3].value == pytest.approx(2.1)
        os.kill(reward._pool._workers[0].process.pid, signal.SIGKILL)
        assert reward.score(actions(*squares(6)))[5].value == pytest.approx(2.1)
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []
