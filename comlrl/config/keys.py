"""Keys of the configuration: each field's default, description and range, in one place.

A section is a frozen dataclass whose fields are made by ``key``. Its checks, its error messages
and its table in ``docs/configuration.md`` are derived from the fields by ``keys_of``.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

WORDS: dict[Any, str] = {
    int: "whole number", float: "number", str: "text", list: "list", tuple: "list",
    dict: "mapping", type(None): "null", Any: "any",
}  # fmt: skip


class Range(NamedTuple):
    """The range of a numeric key; None: no bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
        bounds = zip(self._fields, self, strict=True)
        return " and ".join(f"{words[name]} {b:g}" for name, b in bounds if b is not None)


class Unused(NamedTuple):
    """A reason why a key has no effect, and the condition under which it holds.

    ``when`` is called with the key's section and the whole configuration.
    """

    reason: str
    when: Callable[[Any, Any], bool]


class Section:
    """A section of a configuration; a dataclass whose fields are made by ``key``."""

    unused_if: ClassVar[tuple[Unused, ...]] = ()  # applies to all keys


def key(
    default: Any, description: str = "", *, unused_if: tuple[Unused, ...] = (), **bounds: float
) -> Any:
    """Make a field with a default, a description, the conditions under which it has no effect, and
    a ``Range``.

    A subclass that overrides only the default inherits the rest. If several conditions of
    ``unused_if`` hold, the first is reported.
    """
    metadata = {
        "description": description,
        "range": Range(**bounds) if bounds else None,
        "unused_if": unused_if,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a section."""

    name: str
    annotation: Any
    default: Any
    description: str
    range: Range | None
    unused_if: tuple[Unused, ...] = ()

    @property
    def members(self) -> tuple[Any, ...]:
        return members(self.annotation)

    @property
    def is_mapping(self) -> bool:
        return any(typing.get_origin(m) is dict for m in self.members)

    @property
    def expected(self) -> str:
        """Return the allowed values, for an error message."""
        return expected(self.annotation)

    def problem(self, value: Any) -> str | None:
        """Explain why a number is out of range, and what to use instead; None if it is valid."""
        if self.range is None or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        null = ", or null" if type(None) in self.members else ""
        return None if value in self.range else f"{value}; use a number {self.range}{null}"


def keys_of(section: type) -> Mapping[str, Key]:
    """Return the keys of a section's dataclass, inherited ones first, with inherited metadata."""
    return _keys_of(section)


@cache
def _keys_of(section: type) -> Mapping[str, Key]:
    described: dict[str, dict[str, Any]] = {}
    for parent in reversed(section.__mro__):
        if dataclasses.is_dataclass(parent):
            for f in dataclasses.fields(parent):
                metadata = {name: value for name, value in f.metadata.items() if value}
                described[f.name] = described.get(f.name, {}) | metadata
    hints = typing.get_type_hints(section)
    return {
        f.name: Key(
            name=f.name,
            annotation=hints[f.name],
            default=f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
            description=described[f.name].get("description", ""),
            range=described[f.name].get("range"),
            unused_if=described[f.name].get("unused_if", ()),
        )
        for f in dataclasses.fields(section)
    }


def out_of_range(name: str, section: object) -> Iterator[str]:
    """Yield an error line for each number out of its key's range; ``name``: the section's name."""
    for key in keys_of(type(section)).values():
        if (problem := key.problem(getattr(section, key.name))) is not None:
            yield f"{name}.{key.name}: {problem}"


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; for any other annotation, the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def fits(value: Any, choice: Any) -> bool:
    """Return whether a value has the type ``choice``, a member of an annotation."""
    if typing.get_origin(choice) is Literal:
        return any(type(value) is type(c) and value == c for c in typing.get_args(choice))
    kind = typing.get_origin(choice) or choice
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and (kind in (bool, Any) or kind not in WORDS)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if kind is not Any and kind in WORDS:
        return isinstance(value, list if kind is tuple else kind)
    return True  # other types are not checked here


def expected(annotation: Any) -> str:
    """Return the values that an annotation allows, for an error message."""
    nouns = {*WORDS.values()} - {"null", "any"}
    *first, last = (
        f"a {word}" if word in nouns or word.startswith("list of") else word
        for word in in_words(annotation)
    )
    return f"{', '.join(first)} or {last}" if first else last


def in_words(annotation: Any, quote: str = "") -> list[str]:
    """Describe each member in words; literals are listed one by one, in ``quote`` characters."""
    words: list[str] = []
    for member in members(annotation):
        kind = typing.get_origin(member) or member
        if kind is Literal:
            words += [f"{quote}{in_yaml(value)}{quote}" for value in typing.get_args(member)]
        elif kind is bool:
            words += ["true", "false"]
        elif kind is list and typing.get_args(member):
            (item,) = typing.get_args(member)
            words.append(f"list of {'s or '.join(in_words(item))}s")
        else:
            words.append(WORDS.get(kind, getattr(kind, "__name__", str(kind))))
    return words


def in_yaml(value: Any) -> str:
    """Return a scalar as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
