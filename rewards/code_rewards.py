"""The aux/main reward as functions over lists of texts, for your own programs.

Training uses ``comlrl.rewards.code.reward.CodeReward``; its module lists the terms.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import lru_cache

from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.reward import CodeReward
from comlrl.types import JointAction, Task


@lru_cache(maxsize=1)
def _shared() -> CodeReward:
    reward = CodeReward()
    atexit.register(reward.close)
    return reward


def execution_reward_aux(
    completion1: Sequence[str],
    completion2: Sequence[str],
    test_cases: Sequence[str],
    entry_points: Sequence[str],
    prompts: Sequence[str] | None = None,
) -> list[float]:
    """Return the reward of each pair of texts.

    Args:
        completion1: texts of the aux agent.
        completion2: texts of the main agent.
        test_cases: sources that define ``check(candidate)``.
        entry_points: names of the main functions.
        prompts: the problems, whose imports and helper functions are added; None for no prompts.

    Raises ValueError if the lengths differ, and TestError for a row without usable tests.
    """
    return [
        breakdown.total
        for breakdown in execution_breakdowns_aux(
            completion1, completion2, test_cases, entry_points, prompts
        )
    ]


def execution_breakdowns_aux(
    completion1: Sequence[str],
    completion2: Sequence[str],
    test_cases: Sequence[str],
    entry_points: Sequence[str],
    prompts: Sequence[str] | None = None,
) -> list[RewardBreakdown]:
    """Return the breakdown of each pair of texts: every term, test outcome and time.

    Arguments and errors are those of ``execution_reward_aux``.
    """
    if prompts is None:
        prompts = [""] * len(completion1)
    columns = (completion1, completion2, test_cases, entry_points, prompts)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(
            "completion1, completion2, test_cases, entry_points and prompts must be equally "
            f"long; got {lengths}"
        )
    actions = [
        JointAction(
            Task(str(row), {"prompt": prompt, "test": test, "entry_point": entry_point}),
            (aux, main),
        )
        for row, (aux, main, test, entry_point, prompt) in enumerate(zip(*columns, strict=True))
    ]
    return [score.facts for score in _shared().score(actions)]
