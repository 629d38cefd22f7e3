"""The base of the arena's games: legal answers, prompts, and the bounds of the score.

An agent's answer is the first legal word of its completion. A completion without one is an illegal
answer, and a joint action with an illegal answer gets the lowest reward of the game.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from comlrl.types import Domain, JointAction, Reward, Score, Task

WORD = re.compile(r"[^\W_]+")


class Bounds(NamedTuple):
    """The bounds of a game's score, as total rewards of an episode."""

    floor: float  # reward without the ability that the game tests
    optimum: float  # highest reward of any team of independent agents

    def score(self, value: float) -> float:
        """Return (value − floor) / (optimum − floor): 0 at the floor, 1 at the optimum."""
        return (value - self.floor) / (self.optimum - self.floor)


def first_legal(text: str, legal: Collection[str]) -> str | None:
    """Return the first word of ``text`` that is in ``legal``, or None if there is none.

    Case is ignored for legal words in lower case. Words in capitals must match exactly, because
    the letter A is a legal message and the article is not.
    """
    for word in WORD.findall(text):
        for spelling in (word, word.lower()):
            if spelling in legal:
                return spelling
    return None


class GameReward(Reward):
    """Base of rewards that are one number per joint action; subclasses define ``value``."""

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        return [Score(self.value(action)) for action in actions]

    @abstractmethod
    def value(self, action: JointAction) -> float:
        """Return the team's reward."""


class Game(Domain):
    """Base of the arena's games; subclasses add rows, roles, prompts, legal answers and reward."""

    name: ClassVar[str]  # of the domain and its builtin data; the rows' field ``game``
    agents: ClassVar[tuple[int, int]] = (2, 2)  # minimum and maximum number
    fields: Sequence[str] = ()

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        if row.get("game") != self.name:
            raise ValueError(f"its field `game` is not '{self.name}'; use builtin:{self.name}")
        self.check_row(row)
        return Task(name, row)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the field, for a row that the game cannot use."""

    def roles(self, num_agents: int) -> tuple[str, ...]:
        least, most = self.agents
        if not least <= num_agents <= most:
            count = f"{least}" if least == most else f"{least} to {most}"
            raise ValueError(f"{self.name} is played by {count} agents")
        return self.role_names(num_agents)

    def role_names(self, num_agents: int) -> tuple[str, ...]:
        return tuple(f"player{number}" for number in range(1, num_agents + 1))

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        return ({},) * num_agents

    @abstractmethod
    def legal(self, task: Task, agent: int, num_agents: int) -> tuple[str, ...]:
        """Return the legal answers of an agent."""

    @abstractmethod
    def bounds(self, task: Task, num_agents: int, num_turns: int, reward: Any) -> Bounds:
        """Return the bounds of an episode's total reward under the run's ``reward``."""

    def answers(self, action: JointAction) -> tuple[str | None, ...]:
        """Return each agent's answer, or None for an illegal one."""
        count = len(action.completions_N)
        return tuple(
            first_legal(text, self.legal(action.task, agent, count))
            for agent, text in enumerate(action.completions_N)
        )

    def answer(self, task: Task, agent: int, num_agents: int, text: str) -> str:
        """Return an agent's answer as the other agents read it."""
        return first_legal(text, self.legal(task, agent, num_agents)) or "nothing"

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """Return the earlier answers of a sequential turn, without the surrounding text."""
        return "".join(
            f"Player {other + 1} chose {self.answer(task, other, num_agents, text)}.\n"
            for other, text in enumerate(written)
        )

    def problem(self, task: Task) -> str:
        return f"{self.name}: {', '.join(f'{k}={v}' for k, v in sorted(task.fields.items()))}"

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        """Return ``legal_answers``, the share of agents whose answer is legal."""
        answers = self.answers(action)
        return {"legal_answers": sum(a is not None for a in answers) / len(answers)}


class PartnersAnswer:
    """External mode ``partner``: each of two agents reads the other's last answer."""

    def __init__(self, prompts: Any) -> None:
        self.prompts = prompts

    def __call__(self, attempts: Sequence[Any]) -> list[tuple[str, ...]]:
        return [self._feedback(attempt) for attempt in attempts]

    def _feedback(self, attempt: Any) -> tuple[str, ...]:
        game, texts = self.prompts.domain, attempt.completions_N
        answers = [game.answer(attempt.task, i, len(texts), text) for i, text in enumerate(texts)]
        return tuple(
            f"Your partner wrote {partner}.\n{revision}"
            for partner, revision in zip(
                reversed(answers), self.prompts.revision_N(attempt), strict=True
            )
        )
