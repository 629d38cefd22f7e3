"""A sparse reward for the code domain: 1 where all tests pass, else 0.

--override reward.target=benchmarks.tests_only:TestsOnly
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from comlrl.types import JointAction, Score
from rewards.code.reward import CodeReward


class TestsOnly(CodeReward):
    """``CodeReward``'s tests without its other terms, and all of them or nothing."""

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        return [
            replace(
                score, value=float(bool(score.passed)), parts={"tests": float(bool(score.passed))}
            )
            for score in super().score(actions)
        ]
