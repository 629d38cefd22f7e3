"""Every HumanEval problem earns exactly what the reward's table says, variant by variant."""

from __future__ import annotations

import pytest

from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.code_rewards import execution_breakdowns_aux, execution_reward_aux
from comlrl.types import JointAction
from tests.support.fakes import code_task

VARIANTS = {
    # main 0.6 + syntax 0.5 + tests 1.0; without a second agent there is no more to earn
    "alone": 2.1,
    "aux_missing": 2.1,
    # + aux 0.4 + main uses aux 0.5
    "thin_return": 3.0,
    "thin_assign": 3.0,
    # + not a thin wrapper 1.0
    "real_main": 4.0,
    "fenced": 4.0,
    # 4.0 − 0.5
    "bare_call": 3.5,
    "unread_name": 3.5,
    # 0.4 + 0.6, then the syntax stops it
    "broken_main": 1.0,
    "broken_aux": 1.0,
    # 0.4, and main's absence stops it
    "main_missing": 0.4,
    "main_without_return": 0.4,
    # 0.4 + 0.6 + 0.5; no test passes, so nothing for the use of aux
    "wrong_main": 1.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_humaneval_problem(reward, problems, variant):
    assert len(problems) == 164
    actions = [JointAction(p.task, p.texts(variant)) for p in problems]
    values = {a.task.task_id: s.value for a, s in zip(actions, reward.score(actions), strict=True)}
    wrong = {name: v for name, v in values.items() if v != pytest.approx(VARIANTS[variant])}
    assert wrong == {}


def test_the_same_program_always_gets_the_same_score(problems):
    random = [p for p in problems if p.task.task_id in ("HumanEval/38", "HumanEval/50")]
    # right for a third of the strings: only a repeated draw gives a repeated score
    text = "import random\n{}\n    return s if random.random() < 0.99 else None\n"
    actions = [JointAction(p.task, (text.format(p.head),)) for p in random]
    actions += [JointAction(p.task, (p.solution,)) for p in problems[53:54]]
    seen = []
    for _ in range(2):
        with CodeReward(workers=1) as reward:
            seen.append([[o.actual for o in s.facts.outcomes] for s in reward.score(actions)])
    assert seen[0] == seen[1]


TASK = code_task(
    "t",
    "",
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n",
    "f",
)
AUX = "def aux(x):\n    return x * x\n"


def total(reward, *texts: str) -> float:
    return reward.score([JointAction(TASK, texts)])[0].value


def test_partial_credit(reward):
    # 0.6 + 0.5 + 1/2
    assert total(reward, "def f(x):\n    return 4\n") == pytest.approx(1.6)
    # 0.4 + 0.6 + 0.5 + 1/2 + 0.5 + 1.0: one passed test is enough for the use of aux
    assert total(reward, AUX, "def f(x):\n    y = aux(2)\n    return y + 0\n") == pytest.approx(3.5)


def test_several_helpers_share(reward):
    aux2 = AUX.replace("aux", "aux2")
    both = "def f(x):\n    y = aux(x)\n    z = aux2(x)\n    return (y + z) // 2\n"
    one = "def f(x):\n    y = aux(x)\n    return y + 0\n"
    thin = "def f(x):\n    return max(aux(x), aux2(x))\n"
    assert total(reward, AUX, aux2, both) == pytest.approx(4.0)
    # 0.4 + 0.6 + 0.5 + 1.0 + 0.5/2 + 1.0
    assert total(reward, AUX, aux2, one) == pytest.approx(3.75)
    # one of two helpers there: 0.4/2 + 0.6 + 0.5 + 1.0 + 0.5/2 + 1.0
    assert total(reward, AUX, "nothing", one) == pytest.approx(3.55)
    assert total(reward, AUX, aux2, thin) == pytest.approx(3.0)
    # 3.75 with one of two ignored: aux2 is called, so 4.0 − 0.5
    ignored = "def f(x):\n    y = aux(x)\n    aux2(x)\n    return y + 0\n"
    assert total(reward, AUX, aux2, ignored) == pytest.approx(3.5)


def test_no_agent_supplies_what_another_is_to_write(reward):
    everything = AUX + "def f(x):\n    y = aux(x)\n    return y + 0\n"
    assert total(reward, everything, "pass") == pytest.approx(0.4)  # main is missing
    # main's own aux does not count and is not there: NameError, so no test passes
    assert total(reward, "pass", everything) == pytest.approx(0.6 + 0.5)


def test_all_of_a_text_runs_and_what_fails_is_passed_over(reward):
    text = "import math\nimport missing_module\n\ndef half(x):\n    return math.floor(x / 2)\n\n"
    text += (
        "def unused():\n    return nothing\n\ndef f(x):\n    return half(2 * x * x)\n\nf(1 / 0)\n"
    )
    score = reward.score([JointAction(TASK, (text,))])[0]
    assert score.value == pytest.approx(2.1)
    program = score.facts.program
    assert "missing_module" in program and "unused" in program and "1 / 0" in program


def test_a_name_that_is_missing_is_reported_as_what_failed_to_bind_it(reward):
    text = "import missing_module as m\nK = 1 / 0\ndef f(x):\n    return {}\n"
    for value, error in (("m.x", "ModuleNotFoundError"), ("K", "ZeroDivisionError")):
        score = reward.score([JointAction(TASK, (text.format(value),))])[0]
        assert [o.error_type for o in score.facts.outcomes] == [error, error]
        line = score.facts.program.split("\n")[score.facts.outcomes[0].line - 1]
        assert line == ("import missing_module as m" if value == "m.x" else "K = 1 / 0")


def test_future_imports_come_first(reward):
    future = "from __future__ import annotations\n"
    text = f"{future}import math\ndef f(x: Missing):\n    return x ** math.floor(2)"
    assert total(reward, future + AUX, text) == pytest.approx(2.5)  # 4.0 − 0.5 − 1.0: no call


def test_breakdown_tells_the_facts(reward):
    main = "def f(x):\n    y = aux(x)\n    if x == 3:\n        return [][0]\n    return y + 1\n"
    score = reward.score([JointAction(TASK, (AUX, main))])[0]
    breakdown = score.facts
    first, second = breakdown.outcomes
    assert score.value == breakdown.total == pytest.approx(0.4 + 0.6 + 0.5)
    assert (first.error_type, first.expected, first.actual) == ("AssertionError", "4", "5")
    assert (second.error_type, second.message) == ("IndexError", "list index out of range")
    assert breakdown.program.split("\n")[second.line - 1].strip() == "return [][0]"
    assert (breakdown.helpers, breakdown.defined, breakdown.called) == (
        ("aux",),
        ("aux", "f"),
        ("aux",),
    )
    assert breakdown.test_fraction == 0.0 and not breakdown.passed_all
    assert breakdown.isolation == reward.isolation
    assert first.source == "assert candidate(2) == 4"


def test_syntax_error_is_located(reward):
    breakdown = reward.score(
        [JointAction(TASK, (AUX, "def f(x):\n    y = aux(x)\n    return y +\n"))]
    )[0].facts
    line = breakdown.program.split("\n")[breakdown.syntax_error.line - 1]
    assert line.strip() == "return y +" == breakdown.syntax_error.text.strip()


def test_stable_function():
    mains = [
        "def f(x):\n    return aux(x)\n",
        "def f(x):\n    y = aux(x)\n    return y * 1\n",
        "no",
    ]
    tests = [TASK.fields["test"]] * 3
    assert execution_reward_aux([AUX] * 3, mains, tests, ["f"] * 3) == pytest.approx(
        [3.0, 4.0, 0.4]
    )
    prompts = [
        "import math\n\ndef square(x):\n    return math.prod([x, x])\n\ndef f(x):\n    '''Doc.'''\n"
    ]
    assert execution_reward_aux(
        ["-"], ["def f(x):\n    return square(x)\n"], tests[:1], ["f"], prompts
    ) == [pytest.approx(2.1)]
    assert execution_breakdowns_aux([AUX], mains[:1], tests[:1], ["f"])[0].wrapper
    with pytest.raises(ValueError, match="equally long"):
        execution_reward_aux([AUX], mains, tests, ["f"] * 3)
