"""From the configuration's ``program`` to what plays its episodes."""

from __future__ import annotations

import inspect
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comlrl.config.keys import keys_of
from comlrl.config.plugins.targets import Target, load
from comlrl.config.resolved import Config
from comlrl.config.sections import ProgramConfig
from comlrl.errors import UserError
from comlrl.programs.command import play_command
from comlrl.programs.program import Program


def check_program(config: Config) -> None:
    """Raise UserError for an algorithm or settings that a program cannot have."""
    name, section = config.algorithm, config.section
    key = "program.target" if config.program.target is not None else "program.command"
    setting = f"{key}: '{config.program.target or config.program.command}'"
    if section.no_programs:
        raise UserError(
            f"{setting} with {name}, which cannot learn from a program: {section.no_programs}; use "
            f"train_magrpo.py or train_grpo.py, or give {key}=null"
        )
    kind: Any = type(section)  # mypy does not see that classes have hashes
    for turns in ("num_turns", "joint_mode", "turn_order", "handoff", "turn_gradient_weights"):
        value = getattr(section, turns)
        if value != keys_of(kind)[turns].default:
            raise UserError(
                f"{name}.{turns}: {value!r} with {key}, which says who acts when; leave "
                f"it out, or give {key}=null"
            )
    if config.distributed.strategy == "fsdp":
        raise UserError(
            f"distributed.strategy: fsdp with {key}, which each process would play for itself, and "
            "all must see the same; give replicate"
        )
    if config.generation.overlap:
        raise UserError(
            f"generation.overlap: 1 with {key}, which is not played while a step updates; give 0"
        )


def load_program(section: ProgramConfig, num_agents: int, key: str, folder: Path) -> Program | None:
    """Return the program that a configuration names, or None.

    ``key``: that of ``num_agents``. ``folder``: where the module is looked for first. Raises
    UserError.
    """
    if section.target is not None and section.command is not None:
        raise UserError(
            f"program.command: '{section.command}' with program.target; give one of them"
        )
    if not section.replaces_turns:
        return None
    _check_names(section.agents, num_agents, key)
    target = _command(section) if section.target is None else _function(section.target, folder)
    return Program(
        target=target,
        names_N=tuple(section.agents),
        on_error=section.on_error,
        timeout=section.timeout,
        max_calls=section.max_calls,
    )


def _function(name: str, folder: Path) -> Target:
    target = load("program.target", name, folder)
    if not inspect.iscoroutinefunction(target.obj):
        raise UserError(
            f"{target} is not an `async` function; write one that is called as play(task, agents)"
        )
    try:
        inspect.signature(target.obj).bind("task", "agents")
    except TypeError as error:
        raise UserError(f"{target} is not called as play(task, agents): {error}") from error
    return target


def _command(section: ProgramConfig) -> Target:
    command = section.command or ""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise UserError(f"program.command: '{command}' cannot be read: {error}") from error
    if not argv or shutil.which(argv[0]) is None:
        raise UserError(
            f"program.command: '{command}'; no such command; give one as in a shell, e.g. "
            "'python my_graph.py'"
        )
    return Target("program.command", command, partial(play_command, argv), ())


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
