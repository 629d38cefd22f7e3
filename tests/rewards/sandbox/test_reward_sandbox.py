"""What travels between the tests and the program, and what the tests see of it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox.inside import wire
from comlrl.types import JointAction
from tests.support.fakes import code_task

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reward():
    with CodeReward(workers=2) as reward:
        yield reward


@pytest.fixture(scope="module")
def hasty():
    """For what uses up its time; a busy machine may take long for the rest."""
    with CodeReward(workers=1, timeout=1.0) as reward:
        yield reward


def outcomes(reward, program: str, *checks: str):
    """Outcomes of a program for ``f`` against the statements of a check."""
    body = "".join(f"    {line}\n" for check in checks for line in check.split("\n"))
    task = code_task("t", "", f"def check(candidate):\n{body}", "f")
    return reward.score([JointAction(task, (program,))])[0].facts.outcomes


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


def test_set_up_runs_in_order_and_its_failure_is_reported(reward):
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
        [JointAction(code_task("t", prompt, test, "f"), ("def f(x):\n    return show(x)\n",))]
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


def test_each_test_has_its_own_time_and_three_timeouts_end_it(hasty):
    program = "import time\ndef f(x):\n    time.sleep(60 if x % 2 else 0)\n    return x\n"
    checks = [f"assert candidate({x}) == {x}" for x in (1, 2, 3, 4, 5, 6)]
    results = outcomes(hasty, program, *checks)
    assert [o.passed for o in results] == [False, True, False, True, False, False]
    assert [o.timed_out for o in results] == [True, False, True, False, True, False]
    assert results[0].message == "more than 1 s"
    assert results[4].message == "more than the 3 s for all tests of a program"
    assert results[5].error_type == "NotRun"


def test_a_value_that_takes_long_to_show_takes_of_the_programs_time(hasty):
    check = "class Slow:\n    def __repr__(self):\n        import time; time.sleep(60)"
    results = outcomes(
        hasty, ECHO, check, "assert candidate(1) == Slow()", "assert candidate(2) == 2"
    )
    assert [o.passed for o in results] == [False, True]
    assert (results[0].expected, results[0].actual) == ("too long to show", "1")


def test_reading_takes_what_comes_in_pieces():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [theirs.send(b"ab") for _ in range(1000)])
        sender.start()
        assert wire.read(ours, 1999) == b"ab" * 999 + b"a"
        sender.join()
        theirs.close()
        assert wire.read(ours, 2) == b""  # one is there, and no more will come


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


def test_helpers_that_a_program_reports_are_bounded(reward):
    """Other names with each reply: no more than a team's, in any outcome."""
    program = """
def f(x):
    names = __entered__.__self__
    names.clear()
    names.update(f"{x}-{n}" for n in range(40 * (x + 1)))
    return x
"""
    results = outcomes(reward, program, *[f"assert candidate({x}) == {x}" for x in range(10)])
    assert all(outcome.passed for outcome in results)
    assert {len(outcome.entered) for outcome in results} == {40}


def test_a_forged_line_number_is_dropped(reward):
    """It has too many digits to be passed on; the judge lives."""
    program = """
import os, sys
def f(x):
    frame = sys._getframe()
    while "channel" not in frame.f_locals:
        frame = frame.f_back
    line = b'{"n":"0x' + b"f" * 9000 + b'"}'
    reply = b'["e",[["KeyError"],[],"forged",' + line + b'],null]'
    frame.f_locals["channel"].send(frame.f_locals["sequence"], reply)
    os._exit(0)
    return x
"""
    (outcome,) = outcomes(reward, program, "assert candidate(1) == 1")
    assert (outcome.error_type, outcome.message, outcome.line) == ("KeyError", "forged", None)


def test_what_tests_set_does_not_reach_the_next_ones(hasty):
    """Those of two rows, in one judge."""
    state = "decimal.getcontext().prec, sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL)"
    imports = "import decimal, locale, sys"
    change = "decimal.getcontext().prec = 3; sys.setrecursionlimit(150); "
    change += "locale.setlocale(locale.LC_ALL, 'C')"
    (first,) = outcomes(hasty, ECHO, imports, f"assert candidate(1) == [{state}]", change)
    (second,) = outcomes(hasty, ECHO, imports, f"assert candidate(2) == [{state}]")
    assert first.expected == second.expected and "28" in first.expected


def test_an_error_in_the_tests_that_cannot_be_printed(reward):
    """It holds a value of the program's; the judge lives to say so, and the next test runs."""
    huge = "def f(x):\n    return 1 << 40000\n"
    found = outcomes(
        reward, huge, "assert candidate(2) == 4, candidate(2)", "assert {}[candidate(2)]",
        "assert candidate(2) > 4",
    )  # fmt: skip
    assert [o.error_type for o in found] == ["AssertionError", "KeyError", None]
    assert found[0].message == "too long to show" and found[0].actual == "<int too long to show>"
