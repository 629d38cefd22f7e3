"""Checks of the arguments that a configuration passes to a class, by the class's signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from comlrl.config.keys import expected, fits, members
from comlrl.errors import UserError, near


def keywords(
    cls: Callable[..., Any],
    key: str,
    arguments: Mapping[str, Any],
    offered: Mapping[str, Any],
    section: str,
) -> dict[str, Any]:
    """Return ``arguments``, and the ``offered`` values for which ``cls`` has a parameter.

    Args:
        cls: a class or factory.
        key: the key that contains the arguments, e.g. "reward.arguments".
        offered: values by parameter name; names that ``cls`` lacks are left out.
        section: the section of the offered values, e.g. "sandbox".

    Raises UserError, naming ``key`` and argument, for an argument that is unknown, missing, set in
    ``section``, or does not match its annotation.
    """
    parameters = _parameters(cls)
    named = {name: value for name, value in offered.items() if name in parameters}
    for name, value in arguments.items():
        if name in named:
            raise UserError(
                f"{key}.{name}: {value!r}; this argument comes from {section}: set it there"
            )
        if replacement := getattr(cls, "removed_arguments", {}).get(name):
            raise UserError(f"{key}.{name}: {value!r}; this argument was removed: {replacement}")
        if name not in parameters:
            allowed = [n for n in parameters if n not in named]
            hint = near(name, allowed, "there are {}")
            raise UserError(f"{key}.{name}: unknown argument, set to {value!r}; {hint}")
        _check(f"{key}.{name}", value, parameters[name])
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in {*arguments, *named}:
            whose = getattr(cls, "__name__", cls)
            raise UserError(f"{key}.{name}: missing, and {whose} cannot be made without it")
    return named | dict(arguments)


def _parameters(cls: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name, with resolved annotations if possible."""
    try:
        signature = inspect.signature(cls)
    except ValueError:  # built-ins may have no signature
        return {}
    try:
        made_by: Any = cls.__init__ if isinstance(cls, type) else cls  # type: ignore[misc]
        hints = typing.get_type_hints(made_by)
    except Exception:  # names imported under TYPE_CHECKING only
        hints = {}
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _check(key: str, value: Any, parameter: inspect.Parameter) -> None:
    valid = any(fits(value, choice) for choice in members(parameter.annotation))
    if not valid and not (value is None and parameter.default is None):
        raise UserError(f"{key}: {value!r} is not valid; use {expected(parameter.annotation)}")
