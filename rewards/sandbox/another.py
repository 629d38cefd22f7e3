"""Helpers whose results are replaced, to see whether a program needs them.

A program that passes all its tests is run again with each helper's result replaced by another
value of its type, and once more by None. It needs the helper if neither run passes.

Standard library only: this is loaded in the sandbox, beside the program. It measures; it does not
guard: a program that looks at how its helper was made can tell that it is replaced.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable
from typing import Any

NAME = "__another__"  # under which a program's text finds the replacement, while it is loaded
DEPTH = 20  # of nested values

Helper = Callable[..., Any]


def another(value: Any, depth: int = DEPTH) -> Any:
    """A value of the same type that differs from this one; None of what no other is known.

    Numbers change sign, parity and truth; what is in a container changes, and so does its length,
    but for a tuple's, which is unpacked. It raises nothing.
    """
    if value is None or not depth:
        return None
    try:
        return _another(value, depth - 1)
    except Exception:  # of a value's own methods
        return None


def _another(value: Any, depth: int) -> Any:
    other = functools.partial(another, depth=depth)
    match value:
        case bool():
            return not value
        case int() | complex():
            return 1 - value
        case float():
            return 0.0 if value != value else -1.5 if value == 0.5 else 1.0 - value
        case str():
            return "".join(map(_character, value)) + (value[-1:] or "a")
        case bytes() | bytearray():
            return type(value)(255 - byte for byte in value) + (value[-1:] or b"a")
        case list():
            return [other(item) for item in value] + (value[-1:] or [0])
        case tuple() if hasattr(value, "_make"):
            return value._make(map(other, value))
        case tuple():
            return tuple(map(other, value)) or (0,)
        case set() | frozenset():
            members = type(value)(map(other, value))
            return members if members != value else members.symmetric_difference({0})
        case dict():
            items = {key: other(item) for key, item in value.items()}
            return items | {other(next(reversed(value), 0)): 0}
        case range():
            return range(value.start + 1, value.stop + 2, value.step)
    if callable(value):
        return lambda *args, **named: other(value(*args, **named))
    if hasattr(value, "__next__"):
        return _items(value, other)
    if hasattr(value, "appendleft"):
        return type(value)([*map(other, value), 0])
    return 1 - value  # Fraction, Decimal and their like


def _items(iterator: Any, other: Callable[[Any], Any]) -> Any:
    for item in iterator:
        yield other(item)
    yield 0


def _character(character: str) -> str:
    if character.isdecimal() and character.isascii():
        return str(9 - int(character))
    return codecs.encode(character, "rot13")


def _replacing(make: Callable[[Any], Any]) -> Callable[[Helper], Helper]:
    """helper → the helper with its results replaced, except those that it hands to itself."""

    def replace(helper: Helper) -> Helper:
        running = False

        @functools.wraps(helper)
        def replaced(*arguments: Any, **keywords: Any) -> Any:
            nonlocal running
            if running:
                return helper(*arguments, **keywords)
            running = True
            try:
                result = helper(*arguments, **keywords)
            finally:
                running = False
            return make(result)

        return replaced

    return replace


REPLACEMENTS = {"another": _replacing(another), "none": _replacing(lambda _: None)}
