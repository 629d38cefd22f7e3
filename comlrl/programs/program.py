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
    """A program that the ``program`` section names, loaded and checked."""

    target: Target
    names_N: tuple[str, ...]  # of the agents
    on_error: Literal["stop", "zero"] = "stop"
    timeout: float = 600.0  # seconds per episode, not counting time spent on sampling
    max_calls: int = 64  # per episode

    @property
    def play(self) -> Play:
        return self.target.obj

    def index(self, name: str) -> int:
        """Return an agent's index. Raises UnknownAgent, which suggests the closest name."""
        if name in self.names_N:
            return self.names_N.index(name)
        hint = near(str(name), self.names_N, "there are {}")
        raise UnknownAgent(f"it asks for the agent {name!r}, which program.agents lacks; {hint}")


class EpisodeError(Exception):
    """An episode cannot be played to its end; the message is the reason."""


class UnknownAgent(KeyError):
    """A program uses an agent that ``program.agents`` does not list."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an episode's agents, for programs that talk to a server."""

    base_url: str
    api_key: str
