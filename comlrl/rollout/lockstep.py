"""Rewards and feedback for processes that sample in lock-step: all processes get the same."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl.processes import distributed
from comlrl.types import Attempt, JointAction, Reward, Score, Transition


class SplitReward(Reward):
    """Each process scores a part, and all get all scores: lock-step needs them to be the same."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        shard = actions[distributed.rank() :: distributed.world_size()]
        return distributed.interleave(distributed.all_gather(self.reward.score(shard)))

    def close(self) -> None:
        self.reward.close()


class FromMain:
    """Feedback of the first process, sent to all: an expert may answer each asker differently."""

    def __init__(self, transition: Transition) -> None:
        self.transition = transition

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        return distributed.from_main(lambda: self.transition(attempts))
