"""``domain: arena-climbing``: who gets past a partner that still explores?

The climbing game of Claus and Boutilier (1998). Two agents each choose a color and share the
payoff of the pair. Red with red pays 11, the most; but against a partner that chooses at random,
red is worth −6.3, green −5.7 and blue 1.7, so averaging over partners leads away from red.
"""

from __future__ import annotations

import itertools
from statistics import fmean
from typing import Any

from comlrl.rewards.arena.game import Bounds, Game, GameReward
from comlrl.types import JointAction, Task

COLORS = ("red", "green", "blue")
PAYOFF = ((11, -30, 0), (-30, 7, 6), (0, 0, 5))  # first agent's color, second agent's color
LEAST = -30.0  # also for an illegal answer
PROMPT = """\
You and a partner each choose red, green or blue. Your team is paid for the pair.
Write your color and nothing else.
"""


def floor() -> float:
    """Return −31/9: both agents choose at random."""
    return fmean(itertools.chain(*PAYOFF))


def optimum() -> float:
    """Return 11: both agents choose red."""
    return max(itertools.chain(*PAYOFF))


class ClimbingReward(GameReward):
    """The shared payoff, or −30 if an answer is illegal."""

    def value(self, action: JointAction) -> float:
        first, second = CLIMBING.answers(action)
        if first is None or second is None:
            return LEAST
        return float(PAYOFF[COLORS.index(first)][COLORS.index(second)])


class Climbing(Game):
    """Two agents that read the same prompt and share a payoff."""

    name = "arena-climbing"
    reward = ClimbingReward

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (PROMPT, PROMPT)

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        return COLORS

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        return Bounds(floor(), optimum())

    def greatest_reward(self, num_agents: int) -> float | None:
        return optimum()


CLIMBING = Climbing()
