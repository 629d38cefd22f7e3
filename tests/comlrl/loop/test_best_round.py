"""A team that falls below the labels of its best round gets that round's weights back."""

from __future__ import annotations

import math

import pytest
import torch

from comlrl.loop.best_round import BestRound, reward_of
from comlrl.preferences.pairs import Round, TaskPairs
from tests.support.preferences import candidates


class Weights:
    """A part of one number. It keeps using the tensor that it is given, as Adam's moments do."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])

    def state_tensors(self):
        return {"value": self.value}

    def load_tensors(self, tensors):
        self.value = tensors["value"]


def labelled(*rewards_of_tasks: tuple[float, ...]) -> Round:
    made = [candidates(str(n), rewards) for n, rewards in enumerate(rewards_of_tasks)]
    return Round(0, tuple(TaskPairs(item, (), 0) for item in made), (), ())


def around(mean: float) -> Round:
    """Six tasks 0.1 off: a variance of 6 · 0.01 / 5 = 0.012, of the mean 0.002."""
    low, high = (mean - 0.1,) * 2, (mean + 0.1,) * 2
    return labelled(low, high, low, high, low, high)


def test_the_error_is_over_tasks():
    """Means 1, 2 and 6, twice: mean 3, variance 2 (4 + 1 + 9) / 5 = 5.6, of the mean 5.6 / 6."""
    three = [(0, 2), (2, 2), (5, 7)]
    mean, error = reward_of(labelled(*three, *three))
    assert (mean, error) == (3.0, pytest.approx(math.sqrt(5.6 / 6)))
    assert reward_of(labelled(*three)) == (3.0, math.inf)  # so few tell nothing of others


def test_the_best_team_comes_back_where_a_later_one_has_fallen():
    """The difference's standard error is √0.004 = 0.0632; three of them below 2.0 is 1.810."""
    weights = Weights(1.0)
    best = BestRound({"agent": weights})
    assert best.offer(around(1.0))
    weights.value += 1.0  # in place, as an optimizer steps
    assert best.offer(around(2.0)) and weights.value == 2.0
    weights.value += 1.0
    assert best.offer(around(1.82))  # below, but within the error
    assert weights.value == 3.0 and best.mean == pytest.approx(2.0)
    assert not best.offer(around(1.80))
    assert weights.value == 2.0
    weights.value += 5.0
    assert best.offer(labelled((0.0, 0.0))) and weights.value == 7.0  # one task
    assert not best.offer(around(0.1)) and weights.value == 2.0


def test_a_checkpoint_holds_it():
    weights = Weights(4.0)
    best, empty = BestRound({"agent": weights}), BestRound({"agent": Weights(0.0)})
    empty.load_tensors(empty.state_tensors())
    assert empty.mean == -math.inf and empty.tensors == {}
    best.offer(around(2.0))
    other = Weights(7.0)
    again = BestRound({"agent": other})
    again.load_tensors(best.state_tensors())
    assert not again.offer(around(0.1)) and other.value == 4.0
