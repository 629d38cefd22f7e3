"""Whether a team needs its helpers, and the rewards that ask."""

from __future__ import annotations

import ast
from collections import Counter, deque, namedtuple
from fractions import Fraction

import pytest

from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox.inside.replaced_results import another
from comlrl.types import JointAction
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
        lone = [p.name for p, n in zip(problems, needed[164:], strict=True) if n != (p.name,)]
        assert lone == []
        assert [s.value for s in scores[164:]] == [pytest.approx(4.0)] * 164
        reward.bonus = "team"
        values = [score.value for score in reward.score([*thin, *show])]
    assert values == [pytest.approx(2.5)] * 328  # 0.4 + 0.6 + 0.5 + 1.0


TEST = "def check(candidate):\n" + "".join(
    f"    assert candidate({x}) == {x * x + 1}\n" for x in (2, 3, 4, 5)
)
TASK = code_task("t", "", TEST, "f")
SQUARE = "def aux(x):\n    return x * x\n"


@pytest.fixture(scope="module")
def reward_of():
    """A reward with one worker, by its settings; tests with the same settings share it."""
    rewards: dict[tuple, CodeReward] = {}

    def with_settings(**settings) -> CodeReward:
        key = tuple(sorted(settings.items()))
        if key not in rewards:
            rewards[key] = CodeReward(workers=1, **settings)
        return rewards[key]

    yield with_settings
    for reward in rewards.values():
        reward.close()


@pytest.fixture(scope="module")
def scored(reward_of):
    """The facts of a team's program."""

    def facts(aux: str | tuple[str, ...], main: str, **settings):
        helpers = (aux,) if isinstance(aux, str) else aux
        action = JointAction(TASK, (*helpers, main))
        return reward_of(**settings).score([action])[0].facts

    return facts


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
def test_needed(scored, main, needed):
    """A helper is needed where nothing else will do in place of its results."""
    seconds = 1.0 if "while" in main else 10.0  # without the helper it may not end
    breakdown = scored(SQUARE, f"def f(x):\n    {main}\n", measure_need=True, timeout=seconds)
    assert breakdown.passed_all and breakdown.needed == (("aux", "f") if needed else ("f",))


@pytest.mark.sample(6)
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
def test_what_a_constant_or_its_argument_can_do_needs_no_helper(reward_of, aux, expression, tests):
    """Main solves the task alone; the helper is there for show."""
    aux = f"def aux(x, y=None):\n    {aux}\n"
    main = f"def f(x):\n    y = {expression}\n    return y\n"
    task = code_task("t", "", "\n".join(TEST.split("\n")[: tests + 1]), "f")
    (score,) = reward_of(bonus="team").score([JointAction(task, (aux, main))])
    assert score.facts.passed_all and score.facts.needed == ("f",)
    assert score.value == pytest.approx(2.5)


def test_a_list_that_is_sorted_in_place_is_no_argument(reward_of):
    """What the program gets in place of the result is the argument as it was."""
    test = "def check(candidate):\n    assert candidate([2, 1]) == 1\n"
    test += "    assert candidate([3, 2]) == 2\n"
    aux = "def aux(x):\n    x.sort()\n    return x\n"
    main = "def f(x):\n    y = aux(list(x))\n    return y[0]\n"
    action = JointAction(code_task("t", "", test, "f"), (aux, main))
    (score,) = reward_of(measure_need=True).score([action])
    assert score.facts.needed == ("aux", "f")


def test_a_helper_that_calls_itself_is_replaced_once(scored):
    aux = "def aux(x):\n    return 0 if x == 0 else aux(x - 1) + 2 * x - 1\n"
    breakdown = scored(aux, "def f(x):\n    y = aux(x)\n    return y + 1\n", measure_need=True)
    assert breakdown.needed == ("aux", "f")


def test_of_several_helpers_each_by_itself(scored):
    aux2 = "def aux2(x):\n    return x\n"
    main = "def f(x):\n    y, z = aux(x), aux2(x)\n    return y + 1 + 0 * z\n"
    breakdown = scored((SQUARE, aux2), main, bonus="team")
    # what `aux2` gives is multiplied by 0; None would raise, another value does not
    assert breakdown.needed == ("aux", "f")
    assert breakdown.uses_aux == breakdown.not_wrapper == 0.0


def test_need_is_not_measured_where_nobody_asks_or_a_test_fails(scored):
    main = "def f(x):\n    y = aux(x)\n    return y + 1\n"
    assert scored(SQUARE, main).needed is None
    half = main.replace("y + 1", "y + (x < 4)")
    breakdown = scored(SQUARE, half, bonus="team")
    assert breakdown.needed == () and breakdown.tests == pytest.approx(0.5)
    assert breakdown.uses_aux == breakdown.not_wrapper == 0.0


def test_the_share_of_tests_scales_the_bonuses(scored):
    half = "def f(x):\n    aux(x)\n    y = aux(x)\n    return y + (x < 4)\n"
    any_test, share = scored(SQUARE, half), scored(SQUARE, half, bonus="share")
    # 0.4 + 0.6 + 0.5 + 0.5 of the tests, and 0.5 + 1.0 − 0.5, of which half
    assert any_test.total == pytest.approx(3.0)
    assert share.total == pytest.approx(2.5)
    assert (share.uses_aux, share.not_wrapper, share.aux_ignored) == (0.25, 0.5, -0.25)


def test_the_replacement_leaves_no_name_behind(scored):
    main = "def f(x):\n    y = aux(x)\n    return y + 1 + ('__another__' in globals())\n"
    assert ast.parse(main)
    assert scored(SQUARE, main, measure_need=True).needed == ("aux", "f")


# A problem that two can share, [3, 1, 2, 2] → the even numbers' squares in order, and the teams
# that solve it: the texts of the helpers and of main, and who is needed.
LISTS = [[3, 1, 2, 4], [2, 4, 1], [8, 4, 6, 5], [1, 2]]
SHARED = "def check(candidate):\n" + "".join(
    f"    assert candidate({xs}) == {sorted(x * x for x in xs if x % 2 == 0)}\n" for xs in LISTS
)
EVEN = "def aux(xs):\n    return [x for x in xs if x % 2 == 0]\n"
SQUARES = "def aux2(xs):\n    return [x * x for x in xs]\n"
ALL = "def aux(xs):\n    return sorted(x * x for x in xs if x % 2 == 0)\n"
ALONE = "sorted(x * x for x in xs if x % 2 == 0)"
TEAMS = {
    "team": (EVEN, "part = aux(xs)\n    return sorted(x * x for x in part)", ("aux", "f")),
    "main_in_two_steps": (EVEN, "ys = [y * y for y in aux(xs)]\n    ys.sort()\n    return ys",
                          ("aux", "f")),
    "aux_twice": (EVEN, "return sorted(aux([x * x for x in aux(xs)]))", ("aux", "f")),
    "wrapper": (ALL, "return aux(xs)", ("aux",)),
    "named_wrapper": (ALL, "part = aux(xs)\n    return part", ("aux",)),
    "wrapper_list": (ALL, "part = aux(xs)\n    return list(part)", ("aux",)),
    "wrapper_sorted": (ALL, "return sorted(aux(xs))", ("aux",)),
    "wrapper_comprehension": (ALL, "part = aux(xs)\n    return [x for x in part]", ("aux",)),
    "wrapper_idle_filter": (ALL, "return [x for x in aux(xs) if x % 2 == 0]", ("aux",)),
    "wrapper_branches": (ALL, "part = aux(xs)\n    return part if part else []", ("aux",)),
    "wrapper_loop": (ALL, "ys = []\n    for y in aux(xs):\n        ys.append(y)\n    return ys",
                     ("aux",)),
    "wrapper_abs": (ALL, "return list(map(abs, aux(xs)))", ("aux",)),
    "wrapper_try": (ALL, "try:\n        return aux(xs)\n    except Exception:\n        return []",
                    ("aux",)),
    "wrapper_copy": (ALL, "return aux(list(xs))", ("aux",)),
    "constant": ("def aux(xs):\n    return 2\n",
                 "k = aux(xs)\n    return sorted(x ** 2 for x in xs if x % k == 0)", ("f",)),
    "argument": ("def aux(xs):\n    return xs\n",
                 "return sorted(x * x for x in aux(xs) if x % 2 == 0)", ("f",)),
    "dead_call": (EVEN, f"part = aux(xs)\n    return {ALONE}", ("f",)),
    "dead_branch": (EVEN, f"if aux(xs) is None:\n        return 0\n    return {ALONE}", ("f",)),
    "check_by_assert": (EVEN, f"assert aux(xs) == [x for x in xs if not x % 2]\n    return {ALONE}",
                        ("f",)),
    "assert_that_binds": (EVEN, "assert (ys := aux(xs)) is not None\n    return sorted("
                          "y * y for y in ys)", ("aux", "f")),
    "missing_aux": ("no function", f"return {ALONE}", ("f",)),
    "three": ((EVEN, SQUARES), "return sorted(aux2(aux(xs)))", ("aux", "aux2", "f")),
    "three_lazy_aux2": ((EVEN, SQUARES), "return sorted(x * x for x in aux(xs))", ("aux", "f")),
    "three_lazy_main": ((EVEN, SQUARES.replace("[x * x for x in xs]", "sorted(x * x for x in "
                         "aux(xs))")), "return aux2(xs)", ("aux", "aux2")),
    "three_hidden_wrapper": ((EVEN, SQUARES.replace("[x * x for x in xs]", ALONE)),
                             "part = aux(xs)\n    return list(aux2(xs))", ("aux2",)),
}  # fmt: skip


@pytest.mark.parametrize("name", TEAMS)
def test_both_sides_are_measured(reward_of, name):
    """Who is needed, the metrics that say so, and what ``bonus=team`` pays."""
    helpers, main, needed = TEAMS[name]
    helpers = (helpers,) if isinstance(helpers, str) else helpers
    texts = (*helpers, f"def f(xs):\n    {main}\n")
    action = JointAction(code_task("t", "", SHARED, "f"), texts)
    (score,) = reward_of(bonus="team").score([action])
    assert score.facts.passed_all and score.facts.needed == needed
    roles = (*("aux", "aux2")[: len(helpers)], "f")
    is_team = set(needed) == set(roles)
    metrics = CODE.measures(action, score)
    assert metrics["teamwork_rate"] == is_team
    assert [metrics[f"agent_{i}/needed_rate"] for i in range(len(roles))] == [
        role in needed for role in roles
    ]
    assert [score.parts[part] for part in ("uses_aux", "not_wrapper", "aux_ignored")] == [0.0] * 3
    assert score.parts["team"] == (1.5 if is_team else 0.0)


def test_one_agent_gets_the_bonus_of_a_team_for_passing_all_tests(reward_of):
    task = code_task("t", "", SHARED, "f")
    mains = ("return sorted(x * x for x in xs if x % 2 == 0)", "return 1")
    actions = [JointAction(task, (f"def f(xs):\n    {main}\n",)) for main in mains]
    solved, unsolved = reward_of(bonus="team").score(actions)
    assert (solved.value, solved.parts["team"]) == (pytest.approx(3.6), 1.5)
    assert unsolved.parts["team"] == 0.0 and unsolved.facts.needed is None


def test_an_unsolved_program_counts_against_teamwork_alone():
    action = JointAction(
        code_task("t", "", SHARED, "f"), (EVEN, "def f(xs):\n    return aux(xs)\n")
    )
    with CodeReward(workers=1) as reward:
        unmeasured = CODE.measures(action, reward.score([action])[0])
        measured = CODE.measures(action, reward.for_evaluation().score([action])[0])
    assert not [name for name in unmeasured if "needed" in name or "teamwork" in name]
    assert measured["teamwork_rate"] == 0.0
    assert not [name for name in measured if "needed" in name]
