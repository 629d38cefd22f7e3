"""``domain: arena-shards``: how does credit reach each of N agents?

N holders (2 to 8) each hold a number and write a digit. A judge acts last, reads their answers and
names a holder; the reward is 1 if the name is right, else 0. The judge sees the answers only with
``turn_order: sequential``. It holds no number: without the answers, it is right with probability
1/N. A team has N + 1 agents.

Rows have ``numbers`` (at least N, of which the first N are used) and ``question``. The question is
``largest``, ``median`` (the lower one if N is even) or ``pair``: are two numbers equal? For
``pair`` the judge answers yes or no; otherwise all numbers of a row must differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from comlrl.errors import UserError
from comlrl.rewards.arena.game import Bounds, Game, GameReward
from comlrl.types import JointAction, Task

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
DIGITS = tuple("123456789")
QUESTIONS = {
    "largest": "who holds the largest number",
    "median": "who holds the median (the lower one of two)",
    "pair": "whether two hold the same number, yes or no",
}
HOLDER = """\
You are {name} and hold the number {number}.
The judge reads what you write and must say {question}.
Write a digit, 1 to 9, and nothing else.
"""
JUDGE = """\
You are the judge of {names}. Each holds a number.
Say {question}. Write one word.
"""


def floor(holders: int, question: str = "largest", numbers: int | None = None) -> float:
    """Return 1/N if the judge names a holder. For ``pair``, return 1 − C(N, 2) / (2 C(M, 2)).

    The latter is the share of rows without a pair among their first N numbers, if half of the rows
    have a pair among all M numbers. ``numbers`` is M; None stands for N.
    """
    if question != "pair":
        return 1 / holders
    return 1 - math.comb(holders, 2) / (2 * math.comb(numbers or holders, 2))


def optimum() -> float:
    """Return 1: nine different messages are enough for nine numbers."""
    return 1.0


def right_answer(numbers: Sequence[int], question: str) -> str:
    """Return the judge's right answer."""
    if question == "pair":
        return "yes" if len(set(numbers)) < len(numbers) else "no"
    place = -1 if question == "largest" else (len(numbers) - 1) // 2
    return NAMES[numbers.index(sorted(numbers)[place])].lower()


class ShardsReward(GameReward):
    """1 if the judge is right and all answers are legal, else 0."""

    def value(self, action: JointAction) -> float:
        *written, named = SHARDS.answers(action)
        fields = action.task.fields
        right = right_answer(fields["numbers"][: len(written)], fields["question"])
        return float(None not in written and named == right)


class Shards(Game):
    """N holders and a judge."""

    name = "arena-shards"
    agents = (3, 9)
    fields = ("name", "names", "number", "question")
    reward = ShardsReward

    def check_row(self, row: Mapping[str, Any]) -> None:
        numbers, question = row.get("numbers"), row.get("question")
        if not isinstance(question, str) or question not in QUESTIONS:
            raise ValueError(f"its field `question` is not one of {', '.join(QUESTIONS)}")
        if not isinstance(numbers, list) or not all(
            type(number) is int and 1 <= number <= 9 for number in numbers
        ):
            raise ValueError("its field `numbers` is not a list of numbers from 1 to 9")
        if question != "pair" and len(set(numbers)) != len(numbers):
            raise ValueError("its field `numbers` contains a number twice")

    def role_names(self, num_agents: int) -> tuple[str, ...]:
        return (*(name.lower() for name in NAMES[: num_agents - 1]), "judge")

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return (*[HOLDER] * (num_agents - 1), JUDGE)

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        holders, numbers = num_agents - 1, task.fields["numbers"]
        if len(numbers) < holders:
            raise UserError(
                f"dataset.name: task '{task.task_id}' contains {len(numbers)} numbers, and "
                f"{holders} agents hold one each; use rows with more numbers, or fewer agents"
            )
        shared = {
            "names": ", ".join(NAMES[:holders]),
            "question": QUESTIONS[task.fields["question"]],
        }
        holders_values = [
            {"name": name, "number": str(number)}
            for name, number in zip(NAMES, numbers[:holders], strict=False)
        ]
        return tuple(
            {**shared, **each}
            for each in (*holders_values, {"name": "the judge", "number": "none"})
        )

    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        if agent < num_agents - 1:
            return DIGITS
        if task.fields["question"] == "pair":
            return ("yes", "no")
        return tuple(name.lower() for name in NAMES[: num_agents - 1])

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the earlier answers for the judge; holders do not read each other's answers."""
        if agent < num_agents - 1:
            return ""
        return "".join(
            f"{name} wrote {self.answer(task, other, num_agents, text)}.\n"
            for other, (name, text) in enumerate(zip(NAMES, written, strict=False))
        )

    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        fields = task.fields
        lowest = floor(num_agents - 1, fields["question"], len(fields["numbers"]))
        return Bounds(lowest, optimum())

    def greatest_reward(self, num_agents: int) -> float | None:
        return optimum()


SHARDS = Shards()
