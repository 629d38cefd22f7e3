"""A class, called with what the configuration gives it: checked by its own signature."""

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
    """Return ``arguments``, and what is ``offered`` to parameters of its names.

    Args:
        cls: a class, or what makes an object.
        key: the key that holds the arguments, e.g. "reward.arguments".
        offered: values by parameter; those that ``cls`` does not name are left out.
        section: the section that holds the offered ones, e.g. "sandbox".

    Raises UserError, naming ``key`` and argument, for one that is unknown, missing or of
    another type than its annotation says.
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
    """Return the parameters that can be given by name, with their annotations resolved where
    possible."""
    try:
        signature = inspect.signature(cls)
    except ValueError:  # written in another language
        return {}
    try:
        made_by: Any = cls.__init__ if isinstance(cls, type) else cls  # type: ignore[misc]
        hints = typing.get_type_hints(made_by)
    except Exception:  # names that exist under TYPE_CHECKING alone; then nothing is known
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
