"""A user's program: the function that plays an episode, its agents, and its limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from comlrl.config.plugins.targets import Target
from comlrl.errors import near
from comlrl.types import Task

Play = Callable[[Task, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A checked program of the ``program`` section."""

    target: Target
    names_N: tuple[str, ...]  # of the agents
    on_error: Literal["stop", "zero"] = "stop"
    timeout: float = 600.0  # seconds of an episode; while its agents are sampled none pass
    max_calls: int = 64  # of an episode

    @property
    def play(self) -> Play:
        return self.target.obj

    def index(self, name: str) -> int:
        """Return an agent's index. Raises KeyError, whose message names the nearest name."""
        if name in self.names_N:
            return self.names_N.index(name)
        hint = near(str(name), self.names_N, "there are {}")
        raise UnknownAgent(f"it asks for the agent {name!r}, which program.agents lacks; {hint}")


class EpisodeError(Exception):
    """Why an episode cannot be played to its end."""


class UnknownAgent(KeyError):
    """A program asks for an agent that it does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an episode's agents, for programs that talk to a server."""

    base_url: str
    api_key: str
