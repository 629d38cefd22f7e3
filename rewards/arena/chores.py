"""``domain: arena-chores``: who can break symmetry?

Four agents read the same prompt and each chooses one of four chores. The reward is the number of
different chores divided by four. Agents with separate policies can reach 1. Agents that share a
policy choose independently from one distribution, which reaches at most 1 − (3/4)⁴ = 0.684 in
expectation, and 0.25 if it is deterministic. With ``numbered: true`` in the row, each prompt begins
with the agent's number, and a shared policy can reach 1 as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comlrl.rewards.arena.game import Bounds, Game, GameReward
from comlrl.types import JointAction, Task

CHORES = ("cook", "clean", "shop", "iron")
PROMPT = """\
{number}Four people each choose a chore: cook, clean, shop or iron.
The team is paid for each different one. Write your chore and nothing else.
"""


def floor() -> float:
    """Return 1 − (3/4)⁴: all agents share the best policy, the uniform distribution."""
    return 1 - (1 - 1 / len(CHORES)) ** len(CHORES)


def optimum() -> float:
    """Return 1: the agents choose four different chores."""
    return 1.0


class ChoresReward(GameReward):
    """The number of different chores / 4, or 0 if an answer is illegal."""

    def value(self, action: JointAction) -> float:
        answers = CHORES_GAME.answers(action)
        return 0.0 if None in answers else len(set(answers)) / len(CHORES)


class ChoresGame(Game):
    """Four agents with identical prompts, except for an optional number."""

    name = "arena-chores"
    agents = (4, 4)
    fields = ("number",)
    reward = ChoresReward

    def check_row(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row.get("numbered", False), bool):
            raise ValueError("its field `numbered` is not true or false")

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (PROMPT,) * num_agents

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        numbered = task.fields.get("numbered", False)
        return tuple(
            {"number": f"You are person {agent + 1}. " if numbered else ""}
            for agent in range(num_agents)
        )

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        return CHORES

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        return Bounds(floor(), optimum())

    def greatest_reward(self, num_agents: int) -> float | None:
        return optimum()


CHORES_GAME = ChoresGame()
