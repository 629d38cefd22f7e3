"""Several answers to a task: grown together, and the same as one after the other."""

from __future__ import annotations

import pytest

from comlrl.evaluation import batches
from comlrl.evaluation.estimates import evaluate
from comlrl.rollout.generation import Generator
from comlrl.rollout.grow import Rollout
from comlrl.types import Shape
from tests.support.fakes import PROMPTS, SAMPLING, SEED, FakeReward, FakeTransition, task
from tests.support.tiny_models import team

TASKS = [task(name) for name in "ABC"]
SHAPES = {
    "one turn": Shape(2, 1, 4),
    "two turns, handoff": Shape(2, 2, 4, handoff="random"),
    "sequential": Shape(2, 1, 4, turn_order="sequential"),
}


class Counting(Rollout):
    grown: list[int]

    def grow_each(self, tasks, shape, sampling, keys):
        self.grown.append(len(tasks))
        return super().grow_each(tasks, shape, sampling, keys)


def rollout() -> Counting:
    class Lengths(FakeReward):
        def one(self, action):
            return float(sum(map(len, action.completions_N)))

    made = Counting(
        Generator(team()), Lengths(lambda *_: 0.0), FakeTransition(), PROMPTS, seed=SEED
    )
    made.grown = []
    return made


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("at_once", "grown"), [(256, [15]), (7, [6, 6, 3]), (1, [3] * 5)])
def test_answers_that_grow_together_are_those_that_grow_alone(name, at_once, grown, monkeypatch):
    monkeypatch.setattr(batches, "AT_ONCE", at_once)
    shape, own = SHAPES[name], rollout()
    trees = evaluate(own, TASKS, shape, SAMPLING, 5)
    assert own.grown == grown
    alone = [rollout().grow(TASKS, shape.chain, SAMPLING, ("eval", s)) for s in range(5)]
    assert trees == [tree for trees in alone for tree in trees]
    assert len({tree.team(0, 0)[0][1].token_ids for tree in trees[::3]}) > 1
