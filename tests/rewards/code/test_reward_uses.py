"""A use of a helper is a call that happens: mentions, aliases that are bound anew, and calls in
code that never runs are none."""

from __future__ import annotations

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction
from tests.support.fakes import code_task

TEST = """
def check(candidate):
    assert candidate(3) == 14
    assert candidate(5) == 30
"""
TASK = code_task("t", "def f(x):\n    '''A function of x.'''\n", TEST, "f")
AUX = "def aux(v):\n    return v * v\n"
WORK = "\n    return x * x + 5\n"


def scored(reward, *texts: str):
    facts = reward.score([JointAction(TASK, texts)])[0].facts
    assert facts.passed_all, (facts.program, facts.outcomes)
    return facts


NO_USES = [
    "aux", "g = aux", "print(aux)", "if aux: pass", "aux.__name__", "(aux, 1)", "not aux",
    "f'{aux}'", "str(aux)", "len([aux])", "dir(aux)", "vars(aux)", "ascii(aux)", "repr(aux)",
    "callable(aux)", "hash(aux)", "id(aux)", "type(aux)", "isinstance(aux, int)",
    "setattr(aux, 'k', 1)", "getattr(aux, 'k', 1)", "hasattr(aux, 'k')", "delattr", "aux == x",
    "assert aux or x", "[y for y in [x] if aux]", "g = h = aux\n    h = g = 1",
    "g = aux\n    match x:\n        case g: pass\n    str(g)",
    "g = aux\n    match (abs,):\n        case (g,): g(x)",
    "g = aux\n    for g in [abs]: g(x)",
    "g = aux\n    with memoryview(b'') as g: len(g)",
    "g = aux\n    def g(v): return v\n    g(x)",
    "g = aux\n    import math as g\n    g.floor(x)",
    "g = aux\n    try: 1 / 0\n    except ZeroDivisionError as g: str(g)",
    "g = aux\n    [g := abs for _ in 'a']\n    g(x)",
    "if False: aux(x)", "if x < 0:\n        return aux(x)", "lambda: aux(x)",
    "def g(): return aux(x)", "g = aux\n    del g", "x or aux(x)", "False and aux(x)",
    "import functools\n    functools.partial(aux)", "def g(h=aux): return 1\n    g()",
    "globals().get('aux')", "class C: g = aux",
]  # fmt: skip


@pytest.mark.parametrize("body", NO_USES)
def test_what_is_no_use(reward, body):
    facts = scored(reward, AUX, f"def f(x):\n    {body}{WORK}")
    assert facts.called == () and facts.total == pytest.approx(2.5)


def test_a_mention_in_the_answer_is_no_use(reward):
    for answer in ("aux and x * x + 5", "x * x + 5 if aux else 1", "(aux, x * x + 5)[1]"):
        assert scored(reward, AUX, f"def f(x):\n    return {answer}\n").total == pytest.approx(2.5)


def test_an_example_is_no_use(reward):
    for example in ("print(aux(3))", "assert aux(3) == 9", "result = aux(3)\nprint(result)",
                    "def test():\n    assert aux(3) == 9\ntest()",
                    "for i in range(3):\n    print(aux(i))", "unittest.main(aux(1))"):  # fmt: skip
        facts = scored(reward, AUX, f"def f(x):{WORK}{example}\n")
        assert facts.total == pytest.approx(2.5), example
    for example in ("print(aux(3))", "assert aux(3) == 9\n"):  # the helper's, before main
        facts = scored(reward, AUX + example, f"def f(x):\n    if x < 0: aux(x){WORK}")
        assert facts.total == pytest.approx(2.5), example


def test_a_table_that_a_helper_fills_is_a_use(reward):
    for table in ("T = [aux(i) for i in range(9)]", "T = []\nfor i in range(9): T.append(aux(i))",
                  "T = {}\ndef build():\n    for i in range(9): T[i] = aux(i)\nbuild()",
                  "T = list(map(aux, range(9)))"):  # fmt: skip
        facts = scored(reward, AUX, f"{table}\ndef f(x):\n    return T[x] + 5\n")
        assert facts.total == pytest.approx(4.0), table


@pytest.mark.parametrize(
    "aux",
    [
        "from functools import lru_cache\n@lru_cache\ndef aux(v):\n    return v * v\n",
        "def twice(g):\n    return lambda v: g(v)\n@twice\ndef aux(v):\n    return v * v\n",
        "def aux(v):\n    return v * v\naux = (lambda g: lambda v: g(v))(aux)\n",
        "def aux(v):\n    '''Doc.'''\n    return v * v if aux.__doc__ == 'Doc.' else 0\n",
        "def aux(v):\n    return 0 if v == 0 else aux(v - 1) + 2 * v - 1\n",
        "from __future__ import annotations\ndef aux(v: Missing) -> Missing:\n    return v * v\n",
    ],
)
def test_calls_of_any_helper_are_counted(reward, aux):
    assert scored(reward, aux, "def f(x):\n    y = aux(x)\n    return y + 5\n").total == 4.0


def test_calls_are_counted_though_other_tests_run_out_of_time():
    main = "def f(x):\n    y = aux(x)\n    while x == 5: pass\n    return y + 5\n"
    with CodeReward(workers=1, timeout=1.0) as reward:
        facts = reward.score([JointAction(TASK, (AUX, main))])[0].facts
    assert [o.passed for o in facts.outcomes] == [True, False]
    assert facts.called == ("aux",) and facts.total == pytest.approx(3.5)


def test_a_helper_of_a_helper_is_not_mains(reward):
    aux2 = "def aux2(v):\n    y = aux(v)\n    return y + 5\n"
    facts = scored(reward, AUX, aux2, "def f(x):\n    y = aux2(x)\n    return y + 0\n")
    assert facts.called == ("aux2",)


def test_where_nothing_passed_the_text_tells(reward):
    facts = reward.score([JointAction(TASK, (AUX, "def f(x):\n    [][0]\n    return aux(x)\n"))])[
        0
    ].facts
    assert facts.called == ("aux",) and facts.total == pytest.approx(1.5)
