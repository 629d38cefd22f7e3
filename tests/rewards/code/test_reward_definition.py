"""What main's text earns beside a helper that squares, case by case: what an attacker tried (2.5:
no use, 3.0: a wrapper, 3.5: a result ignored), and what is ordinary for a model to write (4.0)."""

from __future__ import annotations

from pathlib import Path

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction
from tests.support.fakes import code_task

TEST = """
def check(candidate):
    assert candidate(3) == 14
    assert candidate(5) == 30
    assert candidate(0) == 5
"""
TASK = code_task("t", "def answer(x):\n    '''A function of x.'''\n", TEST, "answer")
AUX = "def aux(v):\n    return v * v\n"
MAIN = "def answer(x):\n    y = aux(x)\n    return y + 5\n"
SECTIONS = Path(__file__).with_name("main_texts.txt").read_text().split("\n==== ")[1:]
CASES = {}  # name → text and reward
for _section in SECTIONS:
    _head, _text = _section.split("\n", 1)
    CASES[_head] = (_text, float(_head.split()[0]))


@pytest.fixture(scope="module")
def scores():
    with CodeReward(workers=2) as reward:
        actions = [JointAction(TASK, (AUX, text)) for text, _ in CASES.values()]
        return dict(zip(CASES, reward.score(actions), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_main_earns(scores, name):
    facts = scores[name].facts
    assert facts.passed_all, (facts.program, facts.syntax_error, facts.outcomes[:1])
    assert facts.total == pytest.approx(CASES[name][1]), facts.program


def value(reward, aux: str, main: str) -> float:
    return reward.score([JointAction(TASK, (aux, main))])[0].value


def test_a_wrapper_of_two_statements(reward):
    # y = next(map(aux, …)); return y: no test passes without the + 5 that aux now adds
    aux = "def aux(v):\n    return v * v + 5\n"
    main = "def answer(x):\n    y = next(map(aux, [x]))\n    return y\n"
    assert value(reward, aux, main) == pytest.approx(3.0)


def test_the_wall_between_the_texts(reward):
    """Neither a definition nor an assignment of one agent stands for what another is to write."""
    both = f"{AUX}answer = lambda x: x * x + 5\n"
    assert value(reward, both, "no code") == pytest.approx(0.4)
    wrong = "def aux(v):\n    return K\nK = 1\nanswer, aux2 = (lambda x: 1), 2\n"
    assert value(reward, wrong, MAIN.replace("aux(x)", "x * x + 0 * aux(x)")) == pytest.approx(4.0)
    assert value(reward, "no code", f"aux = lambda v: v * v\n{MAIN}") == pytest.approx(0.6 + 0.5)


def test_a_global_that_a_helper_reads_is_read(reward):
    main = "def answer(x):\n    global t\n    t = 1\n    t = aux(x)\n    return x * x + 5\n"
    assert value(reward, AUX, main) == pytest.approx(3.5)
    reader = "def aux(v):\n    return t if 0 else v * v\n"
    assert value(reward, reader, main) == pytest.approx(4.0)
    local = "def aux(t):\n    return t * t\n"  # its own t
    assert value(reward, local, main) == pytest.approx(3.5)


def test_level_one_below_if_true(reward):
    aux = "if True:\n    def aux(v):\n        return v * v\n"
    assert value(reward, aux, MAIN) == pytest.approx(4.0)
    assert value(reward, aux, "if True:\n    def answer(x):\n        return ((") == pytest.approx(
        1.0
    )
