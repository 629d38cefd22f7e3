"""``domain: arena-levers``: does a team agree with anybody but itself?

The lever game of Other-Play (Hu et al. 2020, arXiv 2003.02979). Two agents each pull one of ten
levers. If both pull the same lever, they get 1, or 0.9 for lever 0; otherwise 0. The other nine
levers are alike, so teams that were trained separately agree on one of them only by luck. Lever 0
is the only one that strangers can agree on. Self-play rewards the wrong choice, so evaluate agents
of different teams together (``evaluate.py --cross-play``).
"""

from __future__ import annotations

from typing import Any

from comlrl.rewards.arena.game import Bounds, Game, GameReward
from comlrl.types import JointAction, Task

LEVERS = tuple("0123456789")
SPECIAL, SPECIAL_PAYS = "0", 0.9
PROMPT = """\
You and a partner each pull a lever, 0 to 9. If both pull the same, your team gets 1 point.
Lever 0 gives only 0.9 points. Write the digit of your lever and nothing else.
"""


def floor() -> float:
    """Return 1/9: two strangers each pull the one of the nine levers that their team chose."""
    return 1 / (len(LEVERS) - 1)


def optimum() -> float:
    """Return 0.9: two strangers both pull lever 0."""
    return SPECIAL_PAYS


class LeversReward(GameReward):
    """1, or 0.9 for lever 0, if both agents pull the same lever; 0 if not, or if one is illegal."""

    def value(self, action: JointAction) -> float:
        first, second = LEVERS_GAME.answers(action)
        if first is None or first != second:
            return 0.0
        return SPECIAL_PAYS if first == SPECIAL else 1.0


class LeversGame(Game):
    """Two agents that read the same prompt."""

    name = "arena-levers"
    reward = LeversReward

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (PROMPT, PROMPT)

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        return LEVERS

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        """Return the bounds for cross-play; a perfect team scores above 1 in self-play."""
        return Bounds(floor(), optimum())

    def greatest_reward(self, num_agents: int) -> float | None:
        """Return 1: in self-play a team can agree on any of the nine levers."""
        return 1.0


LEVERS_GAME = LeversGame()
