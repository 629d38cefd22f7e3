"""A user's program: the function that plays an episode, its agents, and its limits."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from comlrl.config.keys import keys_of
from comlrl.config.plugins.targets import Target, load, near
from comlrl.config.resolved import Config
from comlrl.config.sections import ProgramConfig
from comlrl.errors import UserError
from comlrl.types import Task

Play = Callable[[Task, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Program:
    """What ``program`` names, checked."""

    target: Target
    names_N: tuple[str, ...]  # of the agents
    on_error: Literal["stop", "zero"] = "stop"
    timeout: float = 600.0  # seconds of an episode; while its agents are sampled none pass
    max_calls: int = 64  # of an episode

    @property
    def play(self) -> Play:
        return self.target.found

    def index(self, name: str) -> int:
        """An agent's place. Raises KeyError, whose message names the nearest."""
        if name in self.names_N:
            return self.names_N.index(name)
        hint = near(str(name), self.names_N, "there are {}")
        raise UnknownAgent(f"it asks for the agent {name!r}, which program.agents lacks; {hint}")


class UnknownAgent(KeyError):
    """A program asks for an agent that it does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


def check_program(config: Config) -> None:
    """Raises UserError for an algorithm or for settings that a program cannot have."""
    name, section, key = config.algorithm, config.section, "program.target"
    given = f"{key}: '{config.program.target}'"
    if section.no_programs:
        raise UserError(
            f"{given} with {name}, which cannot learn from a program: {section.no_programs}; use "
            f"train_magrpo.py or train_grpo.py, or give {key}=null"
        )
    for turns in ("num_turns", "joint_mode", "turn_order", "handoff", "turn_gradient_weights"):
        value = getattr(section, turns)
        if value != keys_of(type(section))[turns].default:
            raise UserError(
                f"{name}.{turns}: {value!r} with {key}, whose function says who acts when; leave "
                f"it out, or give {key}=null"
            )
    if config.distributed.strategy == "fsdp":
        raise UserError(
            "distributed.strategy: fsdp with program.target, which each process would play for "
            "itself, and all must see the same; give replicate"
        )
    if config.generation.overlap:
        raise UserError(
            "generation.overlap: 1 with program.target, whose first prompts are not known before "
            "it is played; give 0"
        )


def load_program(section: ProgramConfig, num_agents: int, key: str, folder: Path) -> Program | None:
    """The program that a configuration names; None: it names none.

    ``key``: that of ``num_agents``. ``folder``: where the module is looked for first. Raises
    UserError.
    """
    if section.target is None:
        return None
    _check_names(section.agents, num_agents, key)
    target = load("program.target", section.target, folder)
    if not inspect.iscoroutinefunction(target.found):
        raise UserError(
            f"{target} is no `async` function; write one that is called as play(task, agents)"
        )
    try:
        inspect.signature(target.found).bind("task", "agents")
    except TypeError as error:
        raise UserError(f"{target} is not called as play(task, agents): {error}") from error
    return Program(
        target, tuple(section.agents), section.on_error, section.timeout, section.max_calls
    )


def _check_names(names: Sequence[str], num_agents: int, key: str) -> None:
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise UserError(
            f"program.agents: {list(names)}; give names of letters, digits and underscores that "
            "differ"
        )
    if len(names) != num_agents:
        raise UserError(
            f"program.agents: {list(names)} has {len(names)} names for {key}={num_agents}; give "
            "one for each agent"
        )
