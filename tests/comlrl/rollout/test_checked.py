"""A user's reward and mode: what they give back is checked, their errors take one line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from comlrl.config.plugins.targets import Target, TargetError
from comlrl.rollout.checked import CheckedDomain, CheckedReward, CheckedTransition
from comlrl.types import Attempt, Domain, JointAction, Score, Task

ACTIONS = [JointAction(Task(f"task/{i}", {}), ("a", "b")) for i in range(2)]
ATTEMPTS = [Attempt(a.task, a.completions_N, Score(1.0), 1) for a in ACTIONS]
TARGET = Target("reward.target", "mine:R", None, ())


class Fixed:
    """Gives, or raises, what it was made with."""

    def __init__(self, given):
        self.given = given

    def score(self, actions):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    __call__ = score


@pytest.mark.parametrize(
    "given",
    [
        [1, 0.5],
        (True, 0.5),
        np.array([1.0, 0.5]),
        torch.tensor([1.0, 0.5]),
        [Score(1.0, {"a": 0.25, "b": 0.75}, True), Score(0.5, passed=False)],
        [Score(1.0), 0.5],
        [Score(9.0, {"a": 1.0}, task_reward=1.0), 0.5],  # trained on a reward model's
        [Score(1.0, by_agent=np.array([3.0, -1.0])), Score(0.5, by_agent=[0.5, 0.5])],
    ],
)
def test_numbers_and_scores(given):
    scores = CheckedReward(Fixed(given), TARGET, by_agent=True).score(ACTIONS)
    assert [score.task_value for score in scores] == [1.0, 0.5]
    assert all(type(score.value) is float for score in scores)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returned None for 2 joint actions; return a list with one score for each"),
        (3.0, "returned 3.0 for 2 joint actions"),
        ([1.0], "returned 1 scores for 2 joint actions; return a list with one score for each"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 joint actions"),
        ([1.0, math.nan], "task 'task/1': returned nan as a score; return finite numbers"),
        ([1e308, 1.0], "task 'task/0': returned 1e+308 as a score"),
        ([Score(0.0, by_agent=(1e20, -1e20)), 1.0], "task 'task/0': returned by_agent="),
        ([math.inf, 1.0], "task 'task/0': returned inf as a score"),
        ([10**400, 1.0], "task 'task/0': returned 1000000"),
        ([1.0, "2"], "task 'task/1': returned '2' as a score"),
        ([1.0, None], "task 'task/1': returned None as a score"),
        ([1.0, [2.0, 3.0]], "task 'task/1': returned [2.0, 3.0] as a score"),
        ([torch.zeros(2), 1.0], "task 'task/0': returned tensor([0., 0.]) as a score"),
        (
            [Score(1.0, by_agent=(1.0,)), 1.0],
            "task 'task/0': returned by_agent=(1.0,); return 2 finite numbers, one for each agent",
        ),
        (
            [Score(1.0, by_agent=(2.0, math.nan)), 1.0],
            "task 'task/0': returned by_agent=(2.0, nan); return 2 finite numbers",
        ),
        ([Score(1.0, parts=None), 1.0], "task 'task/0': returned parts=None; return a mapping"),
        ([Score(1.0, parts=[1.0]), 1.0], "task 'task/0': returned parts=[1.0]; return a mapping"),
        ([Score(1.0, {1: 1.0}), 1.0], "task 'task/0': returned parts={1: 1.0}; return a mapping"),
        ([Score(None, task_reward=1.0), 1.0], "task 'task/0': returned Score(value=None"),
        (
            [Score(1.0, passed=np.ones(2, bool)), 1.0],
            "task 'task/0': returned passed=array([ True, True]); return true, false or",
        ),
        ([Score(1.0, by_agent=3.0), 1.0], "task 'task/0': returned by_agent=3.0; return 2 finite"),
        (
            [Score(1.0, by_agent="ab"), 1.0],
            "task 'task/0': returned by_agent='ab'; return 2 finite",
        ),
        (
            [Score(3.0, by_agent=(1.0, 2.0)), 1.0],
            "task 'task/0': returned 3, and by_agent with a mean of 1.5; return the mean",
        ),
        (
            [Score(1.0, {"a": math.nan}), 1.0],
            "task 'task/0': returned Score(value=1.0, parts={'a': nan}",
        ),
        (
            [Score(1.0, {"a": 0.5, "b": 0.25}), 1.0],
            "task 'task/0': returned 1, and parts that sum to 0.75; return parts",
        ),
        (
            [Score(1.0, passed="yes"), 1.0],
            "task 'task/0': returned passed='yes'; return true, false or",
        ),
        (KeyError("x"), "raised KeyError: 'x' ("),
    ],
)
def test_what_is_no_score(given, message):
    with pytest.raises(TargetError) as raised:
        CheckedReward(Fixed(given), TARGET, by_agent=True).score(ACTIONS)
    assert str(raised.value).startswith("reward.target: 'mine:R'") and message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_close_and_for_evaluation_may_be_left_out():
    reward = CheckedReward(Fixed([1.0, 2.0]), TARGET)
    reward.close()
    assert reward.for_evaluation() is reward
    assert reward.score([]) == []  # of a process without a share; it is not asked


def test_close_and_for_evaluation_where_they_are():
    class Whole(Fixed):
        closed = 0

        def for_evaluation(self):
            return Fixed([7.0, 8.0])

        def close(self):
            self.closed += 1

    reward = CheckedReward(whole := Whole([1.0, 2.0]), TARGET)
    assert [s.value for s in reward.for_evaluation().score(ACTIONS)] == [7.0, 8.0]
    reward.close()
    assert whole.closed == 1


def test_texts():
    feedback = CheckedTransition(Fixed([["x", "y"], ("z", "")]), TARGET)(ATTEMPTS)
    assert feedback == [("x", "y"), ("z", "")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("x", "y")], "answered 1 of 2 attempts; answer each"),
        ([("x", "y"), ("z",)], "returned ('z',) for 2 agents; return one text for each"),
        ([("x", "y"), ("z", None)], "returned ('z', None) for 2 agents"),
        (None, "raised TypeError: 'NoneType' object is not iterable"),
        (ZeroDivisionError(), "raised ZeroDivisionError ("),
    ],
)
def test_what_are_no_texts(given, message):
    with pytest.raises(TargetError) as raised:
        CheckedTransition(Fixed(given), TARGET)(ATTEMPTS)
    assert str(raised.value).startswith(f"reward.target: 'mine:R' {message}")


def test_each_agents_own_reward_becomes_plain_numbers():
    given = [Score(1.0, by_agent=np.array([3.0, -1.0])), Score(0.5)]
    scores = CheckedReward(Fixed(given), TARGET, by_agent=True).score(ACTIONS)
    assert [score.by_agent for score in scores] == [(3.0, -1.0), None]
    assert all(type(own) is float for own in scores[0].by_agent)


def test_everything_in_a_score_becomes_plain():
    given = [
        Score(torch.tensor(9.0), {"a": np.float32(1.0)}, np.bool_(True), task_reward=np.int64(1)),
        Score(0.5, {"a": torch.tensor([0.5])}, torch.tensor(False)),
    ]
    scores = CheckedReward(Fixed(given), TARGET).score(ACTIONS)
    assert scores == [Score(9.0, {"a": 1.0}, True, task_reward=1.0), Score(0.5, {"a": 0.5}, False)]
    json.dumps([[s.value, s.task_reward, s.passed, dict(s.parts)] for s in scores])


def test_facts_become_plain():
    class Stating(Domain):
        def described(self, score):
            return score.facts

    domain = CheckedDomain(Stating(), TARGET)
    facts = {"price": np.int64(3), "prices": torch.tensor([1, 2]), "note": "x"}
    assert domain.described(Score(1.0, facts=facts)) == {"price": 3, "prices": [1, 2], "note": "x"}
    with pytest.raises(TargetError, match="raised TypeError: a fact is a set"):
        domain.described(Score(1.0, facts={"seen": {1}}))


def test_a_class_says_that_agents_have_rewards_of_their_own():
    given = [Score(1.0, by_agent=(3.0, -1.0)), Score(0.5)]
    with pytest.raises(
        TargetError, match=r"task 'task/0': returned by_agent, which .* by_agent = Tr"
    ):
        CheckedReward(Fixed(given), TARGET).score(ACTIONS)
