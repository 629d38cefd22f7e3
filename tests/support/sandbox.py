"""What tests look at inside a sandbox."""

from __future__ import annotations

from typing import Any

from comlrl.rewards.code.reward import CodeReward


def workers(reward: CodeReward) -> list[Any]:
    """The running workers of a reward, each with its ``process`` and its ``directory``."""
    return reward.pool.workers
