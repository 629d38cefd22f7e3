"""Loading of the program that the configuration's ``program`` section names."""

from __future__ import annotations

import inspect
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from comlrl.config.plugins.targets import Target, load
from comlrl.config.sections import ProgramConfig
from comlrl.errors import UserError
from comlrl.programs.command import play_command
from comlrl.programs.program import Program


def load_program(section: ProgramConfig, num_agents: int, key: str, folder: Path) -> Program | None:
    """Return the program that the ``program`` section names, or None if it names none.

    ``key`` is the name of the setting that gave ``num_agents``; the module is searched for in
    ``folder`` first. Raises UserError for an invalid section.
    """
    if section.target is not None and section.command is not None:
        raise UserError(
            f"program.command: '{section.command}' with program.target; set one of them"
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
            f"program.command: '{command}'; no such command; write it as in a shell, e.g. "
            "'python my_graph.py'"
        )
    return Target("program.command", command, partial(play_command, argv), ())


def _check_names(names: Sequence[str], num_agents: int, key: str) -> None:
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise UserError(
            f"program.agents: {list(names)}; use different names of letters, digits and underscores"
        )
    if len(names) != num_agents:
        raise UserError(
            f"program.agents: {list(names)} lists {len(names)} names for {key}={num_agents}; list "
            "one for each agent"
        )
