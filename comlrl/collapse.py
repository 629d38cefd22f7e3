"""Notices a policy that falls off a cliff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WATCHED = ("entropy", "reward_mean")
MEMORY = 0.9  # of the running level, per training step
SHARE = 0.1  # of the level: below it is a cliff
FIRST_STEPS = 5  # in which the level is only learnt


class Collapse:
    """Compares entropy and reward with their own recent level; each warns once a run."""

    def __init__(self) -> None:
        self.level: dict[str, float] = {}
        self.seen = 0
        self.told: list[str] = []

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings that this step's metrics give cause for."""
        self.seen += 1
        warnings = []
        for name in WATCHED:
            value = metrics.get(name)
            if value is None:
                continue
            level = self.level.get(name, value)
            cliff = level > 0 and value < SHARE * level
            if self.seen > FIRST_STEPS and cliff and name not in self.told:
                self.told.append(name)
                warnings.append(
                    f"{name} fell to {value:.3g} from about {level:.3g}: the policy may have "
                    "collapsed; a lower learning_rate or a kl_coef > 0 may help"
                )
            self.level[name] = MEMORY * level + (1 - MEMORY) * value
        return warnings

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "seen": self.seen, "told": self.told}

    def load(self, state: Mapping[str, Any]) -> None:
        self.level, self.seen = dict(state["level"]), state["seen"]
        self.told = list(state["told"])
