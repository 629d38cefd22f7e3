"""Trees grown with a fake model, reward and transition."""

from __future__ import annotations

from collections.abc import Callable

from comlrl.rollout.grow import Rollout
from comlrl.rollout.reading import History
from comlrl.types import Shape, Tree
from tests.support.fakes import (
    PROMPTS,
    SAMPLING,
    SEED,
    FakeReward,
    FakeSampler,
    FakeTransition,
    task,
)

KEY = ("train", 3)


class Grown:
    """Trees of a rollout and all that it asked."""

    def __init__(
        self,
        shape: Shape,
        value: Callable = lambda name, path, gs: 0.0,
        *,
        names: str = "A",
        history: History | None = None,
        process: Callable = lambda reward: reward,
        max_length: int = 10_000,
    ) -> None:
        self.sampler = FakeSampler(max_length)
        self.reward = FakeReward(value)
        self.transition = FakeTransition()
        self.rollout = Rollout(
            self.sampler, self.reward, self.transition, PROMPTS, seed=SEED,
            history=history or History(), process=process,
        )  # fmt: skip
        self.trees = self.rollout.grow([task(n) for n in names], shape, SAMPLING, KEY)


def places(tree: Tree) -> list[tuple[int, int, int]]:
    return [(node.turn, node.parent, node.parent_action) for node in tree.nodes]
