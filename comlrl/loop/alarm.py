"""Detects a collapsing policy, and training steps without a learning signal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MEMORY = 0.9  # decay of the exponential moving average (the level), per training step
SHARE = 0.1  # a value below this fraction of the level is a collapse
FIRST_STEPS = 5  # steps without an alarm, in which the level is initialized
LASTING = 3  # steps in a row that raise the alarm; a single one may only have hard tasks


ADVICE = (
    "try prompts that the model follows better, a higher temperature, entropy_coef > 0, an easier "
    "split, more num_generations, or refill"
)


class CollapseAlarm:
    """Compares entropy and reward with their moving averages; each warns once per run.

    The reward is the task's, because a reward model's score has no natural zero. Further warnings
    are about consecutive steps in which all siblings have equal returns, and about a step in which
    no agent was called.
    """

    def __init__(self) -> None:
        self.equal = self.equal_in_a_row = 0  # steps without an advantage
        self.level: dict[str, float] = {}
        self.seen = 0
        self.below: dict[str, int] = {}  # consecutive steps
        self.warned: list[str] = []  # metrics with a warning so far

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Return warnings about this step's metrics."""
        self.seen += 1
        warnings = []
        reward_name = (
            "reward_mean" if metrics.get("task_reward_mean") is None else "task_reward_mean"
        )
        for name in ("entropy", reward_name):
            value = metrics.get(name)
            if value is None or not math.isfinite(value):
                continue
            level = self.level.get(name, value)
            cliff = self.seen > FIRST_STEPS and level > 0 and value < SHARE * level
            self.below[name] = self.below.get(name, 0) + 1 if cliff else 0
            if self.below[name] == LASTING and name not in self.warned:
                self.warned.append(name)
                warnings.append(
                    f"{name} fell to {value:.3g} from about {level:.3g}: the policy may have "
                    "collapsed; a lower learning_rate or a kl_coef > 0 may help"
                )
            self.level[name] = MEMORY * level + (1 - MEMORY) * value
        if metrics.get("tokens") == 0 and "tokens" not in self.warned:
            self.warned.append("tokens")
            warnings.append(
                "a step sampled no tokens, so that it trained nothing: no agent was called; a "
                "program may lack an `await`, or fail before its first call (docs/programs.md)"
            )
        is_equal = metrics.get("zero_advantage_share") == 1
        self.equal += is_equal
        self.equal_in_a_row = self.equal_in_a_row + 1 if is_equal else 0
        if self.equal_in_a_row == LASTING and "zero_advantage_share" not in self.warned:
            self.warned.append("zero_advantage_share")
            warnings.append(
                f"{LASTING} steps in a row taught nothing: all answers to a task earned the same; "
                + ADVICE
            )
        return warnings

    def summary(self) -> str:
        """Return a line about steps without an advantage for the run's end; empty if few."""
        if self.equal < LASTING or self.equal < SHARE * self.seen:
            return ""
        text = f"{self.equal} of {self.seen} steps taught nothing: all answers to a task earned "
        return f"{text}the same; {ADVICE}"

    def state(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "seen": self.seen,
            "below": self.below,
            "told": self.warned,  # the key in checkpoints
            "equal": [self.equal, self.equal_in_a_row],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.level = {name: float(value) for name, value in state["level"].items()}
        self.below = {name: int(steps) for name, steps in state["below"].items()}
        self.seen, self.warned = int(state["seen"]), list(state["told"])
        self.equal, self.equal_in_a_row = map(int, state.get("equal", (0, 0)))
