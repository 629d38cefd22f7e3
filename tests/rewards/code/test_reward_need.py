"""Whether a team needs its helpers, and the rewards that ask."""

from __future__ import annotations

import ast
from collections import Counter, deque, namedtuple
from fractions import Fraction

import pytest

from comlrl.types import JointAction
from rewards.code.reward import CodeReward
from rewards.sandbox.inside.replaced_results import another
from tests.support.benchmark_rows import Problem
from tests.support.fakes import code_task

VALUES = [
    True, 0, 1, 2, -3, 10**30, 0.5, 1.0, float("inf"), 1j, "", "a", "12", "((", b"", b"ab",
    bytearray(b"a"), [], [1], [0, 1], [[1], []], (), (0, 1), ((1,), "x"), set(), {0, 1}, {"a"},
    frozenset(), frozenset({0}), {}, {"a": 1}, {0: [1]}, range(3), Counter("aab"), deque([1]),
    Fraction(1, 3), namedtuple("Point", "x y")(1, 2),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_another_value_of_its_type(value):
    other = another(value)
    assert other != value
    assert isinstance(other, type(value)) or isinstance(value, Counter | bool)


def test_another_of_what_comes_piece_by_piece():
    assert list(another(iter([1, 2]))) == [0, -1, 0]
    assert another(len)("abc") == -2
    assert another(None) is None
    assert another(float("nan")) == 0.0
    endless: list = []
    endless.append(endless)
    assert another(endless) != 0  # however deep


def dead_call(problem: Problem) -> tuple[str, str]:
    """Main solves the task alone and calls aux where it cannot matter."""
    main = problem.main(f"unread = {problem.call}", f"if unread == {problem.name}: return unread")
    return "def aux(*values):\n    return values\n", main


@pytest.mark.slow
def test_all_of_humaneval(problems):
    """A thin team needs its aux 164 times of 164, and one with a call for show 0 times. What is
    published pays the show in full."""
    thin = [JointAction(p.task, p.texts("thin_return")) for p in problems]
    show = [JointAction(p.task, dead_call(p)) for p in problems]
    assert len(thin) == 164
    with CodeReward(workers=2, measure_need=True) as reward:
        scores = reward.score([*thin, *show])
        needed = [score.facts.needed for score in scores]
        free = [p.name for p, n in zip(problems, needed[:164], strict=True) if n != ("aux",)]
        assert free == []
        assert set(needed[164:]) == {()}
        assert [s.value for s in scores[164:]] == [pytest.approx(4.0)] * 164
        reward.need_bonus = True
        values = [score.value for score in reward.score([*thin, *show])]
    # 0.4 + 0.6 + 0.5 + 1.0, and 0.5 for a use that matters
    assert values == [pytest.approx(3.0)] * 164 + [pytest.approx(2.5)] * 164


TEST = "def check(candidate):\n" + "".join(
    f"    assert candidate({x}) == {x * x + 1}\n" for x in (2, 3, 4, 5)
)
TASK = code_task("t", "", TEST, "f")
SQUARE = "def aux(x):\n    return x * x\n"


def scored(aux: str | tuple[str, ...], main: str, **settings):
    helpers = (aux,) if isinstance(aux, str) else aux
    with CodeReward(workers=1, **settings) as reward:
        return reward.score([JointAction(TASK, (*helpers, main))])[0].facts


@pytest.mark.parametrize(
    ("main", "needed"),
    [
        ("y = aux(x)\n    return y + 1", True),
        ("return list(map(aux, [x]))[0] + 1", True),
        ("def g(h=aux):\n        return h(x)\n    return g() + 1", True),
        ("return x * x + 1 if aux(x) == x * x else 0", True),
        ("y = aux(x)\n    return x * x + 1", False),
        ("y = aux(x) + 1\n    return x * x + 1", False),  # None alone would raise
        ("y = aux(x)\n    if y is None: return 0\n    return x * x + 1", False),
        ("y = aux(x)\n    while y != x * x: pass\n    return x * x + 1", True),  # never ends
        ("y = aux(x)\n    while y < 0: pass\n    return x * x + 1 + 0 * y", False),  # a constant
        ("try: y = aux(x) + 1\n    except TypeError: y = x * x + 1\n    return y", 0),
        ("return x * x + 1", False),
    ],
)  # fmt: skip
def test_needed(main, needed):
    """A helper is needed where nothing else will do in place of its results."""
    seconds = 1.0 if "while" in main else 10.0  # without the helper it may not end
    breakdown = scored(SQUARE, f"def f(x):\n    {main}\n", measure_need=True, timeout=seconds)
    assert breakdown.passed_all and breakdown.needed == (("aux",) if needed else ())


@pytest.mark.parametrize(
    ("aux", "expression"),
    [
        ("return 0", "x * x + 1 + aux(x)"),
        ("return 1", "(x * x + 1) * aux(x)"),
        ("return 'k'", "{'k': x * x + 1}[aux(x)]"),
        ("return x", "{x: x * x + 1}[aux(x)]"),
        ("return x", "aux(x) ** 2 + 1"),
        ("return 7", "x * x + 1 if aux(x) == 7 else None"),
        ("return y", "{x: x * x + 1}[aux(0, x)]"),
        ("return x, y", "aux(x, 1)[0] ** 2 + aux(x, 1)[1]"),
        ("return iter([1, 2])", "x * x + sum(aux(x)) - 2"),
        ("return [1, 2]", "x * x + aux(x).pop() - 1"),
    ],
)
@pytest.mark.parametrize("tests", [4, 1])
def test_what_a_constant_or_its_argument_can_do_needs_no_helper(aux, expression, tests):
    """Main solves the task alone; the helper is there for show."""
    aux = f"def aux(x, y=None):\n    {aux}\n"
    main = f"def f(x):\n    y = {expression}\n    return y\n"
    task = code_task("t", "", "\n".join(TEST.split("\n")[: tests + 1]), "f")
    with CodeReward(workers=1, need_bonus=True) as reward:
        score = reward.score([JointAction(task, (aux, main))])[0]
    assert score.facts.passed_all and score.facts.needed == ()
    assert score.value == pytest.approx(2.5)


def test_a_list_that_is_sorted_in_place_is_no_argument():
    """What the program gets in place of the result is the argument as it was."""
    test = "def check(candidate):\n    assert candidate([2, 1]) == 1\n"
    test += "    assert candidate([3, 2]) == 2\n"
    aux = "def aux(x):\n    x.sort()\n    return x\n"
    main = "def f(x):\n    y = aux(list(x))\n    return y[0]\n"
    with CodeReward(workers=1, measure_need=True) as reward:
        score = reward.score([JointAction(code_task("t", "", test, "f"), (aux, main))])[0]
    assert score.facts.needed == ("aux",)


def test_a_helper_that_calls_itself_is_replaced_once():
    aux = "def aux(x):\n    return 0 if x == 0 else aux(x - 1) + 2 * x - 1\n"
    breakdown = scored(aux, "def f(x):\n    y = aux(x)\n    return y + 1\n", measure_need=True)
    assert breakdown.needed == ("aux",)


def test_of_several_helpers_each_by_itself():
    aux2 = "def aux2(x):\n    return x\n"
    main = "def f(x):\n    y, z = aux(x), aux2(x)\n    return y + 1 + 0 * z\n"
    settings = {"measure_need": True, "need_bonus": True}
    breakdown = scored((SQUARE, aux2), main, **settings)
    # what `aux2` gives is multiplied by 0; None would raise, another value does not
    assert breakdown.needed == ("aux",)
    assert breakdown.uses_aux == pytest.approx(0.25)  # 0.5 · one of two helpers
    assert breakdown.not_wrapper == pytest.approx(1.0)


def test_need_is_not_measured_where_nobody_asks_or_a_test_fails():
    main = "def f(x):\n    y = aux(x)\n    return y + 1\n"
    assert scored(SQUARE, main).needed is None
    half = main.replace("y + 1", "y + (x < 4)")
    breakdown = scored(SQUARE, half, need_bonus=True)
    assert breakdown.needed is None and breakdown.tests == pytest.approx(0.5)
    assert breakdown.uses_aux == breakdown.not_wrapper == 0.0


def test_the_share_of_tests_scales_the_bonuses():
    half = "def f(x):\n    aux(x)\n    y = aux(x)\n    return y + (x < 4)\n"
    any_test, share = scored(SQUARE, half), scored(SQUARE, half, bonus="share")
    # 0.4 + 0.6 + 0.5 + 0.5 of the tests, and 0.5 + 1.0 − 0.5, of which half
    assert any_test.total == pytest.approx(3.0)
    assert share.total == pytest.approx(2.5)
    assert (share.uses_aux, share.not_wrapper, share.aux_ignored) == (0.25, 0.5, -0.25)


def test_the_replacement_leaves_no_name_behind():
    main = "def f(x):\n    y = aux(x)\n    return y + 1 + ('__another__' in globals())\n"
    assert ast.parse(main)
    assert scored(SQUARE, main, measure_need=True).needed == ("aux",)
