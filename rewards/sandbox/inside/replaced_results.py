"""Replaces the results of helpers, to measure whether a program needs them.

A program that passes all its tests is run again with each helper's results replaced: by a different
value of the same type, by None, by a constant, and by the helper's arguments (the first, or all if
the result has as many items; then the last). The program needs the helper if none of these runs
passes. The constant is the helper's first result. With a single test, which that constant could
pass, it is the helper's result for other arguments. To measure whether the program needs the entry
point, each helper takes the entry point's place unchanged (``HANDED_ON``).

Standard library only, because this is loaded in the sandbox, beside the program. It is a
measurement, not a safeguard: a program that inspects its helper can detect the replacement.
"""

from __future__ import annotations

import codecs
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

HANDED_ON = "handed_on"
NAME = "__another__"  # the replacement's name in the program's source, while it is loaded
DEPTH = 20  # of nested values
MAX_ITEMS = 10_000  # of an iterator that is replayed

Helper = Callable[..., Any]
Replacement = Callable[[Any, list[Any]], Any]  # (result, arguments) → the new result


def another(value: Any, depth: int = DEPTH) -> Any:
    """Return a different value of the same type, or None if no such value is known.

    Numbers change sign, parity and truth value. Containers change their items, including the last,
    their length and the number of distinct items; tuples keep their length, since they are often
    unpacked. Raises no error.
    """
    if value is None or not depth:
        return None
    try:
        return _other(value, depth - 1)
    except Exception:  # raised by the value's methods
        return None


def _other(value: Any, depth: int) -> Any:
    other = functools.partial(another, depth=depth)
    match value:
        case bool():
            return not value
        case int() | complex():
            return 1 - value
        case float():
            return 0.0 if value != value else -1.5 if value == 0.5 else 1.0 - value
        case str():
            characters = "".join(map(_character, value))
            return characters + next((c for c in "nxqk7" if c not in value + characters), "n")
        case bytes() | bytearray():
            return type(value)(255 - byte for byte in value) + (value[-1:] or b"a")
        case list():
            changed = list(map(other, value))
            fresh = _grown(value[-1]) if value else 0
            return [*changed, _grown(fresh) if fresh in value + changed else fresh]
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
    return 1 - value  # Fraction, Decimal and similar types


def _grown(item: Any) -> Any:
    match item:
        case bool():
            return not item
        case int() | float():
            return 2 * abs(item) + 5
        case str():
            return item + item + "n"
        case list():
            return [*item, *item, 0]
        case tuple():
            return tuple(map(_grown, item))
    return item


def _items(iterator: Any, other: Callable[[Any], Any]) -> Any:
    for item in iterator:
        yield other(item)
    yield 0


def _character(character: str) -> str:
    if character.isdecimal() and character.isascii():
        return str(9 - int(character))
    return codecs.encode(character, "rot13")


def _constant() -> Replacement:
    first: list[Any] = []

    def constant(answer: Any, _: list[Any]) -> Any:
        again = hasattr(answer, "__next__")
        if not first:
            first.append(list(itertools.islice(answer, MAX_ITEMS)) if again else _copied(answer))
        return iter(_copied(first[0])) if again else _copied(first[0])

    return constant


def _elsewhere(helper: Helper) -> Helper:
    """Wrap a helper so that it first answers with its result for other arguments, if any."""
    called = False

    @functools.wraps(helper)
    def answer(*arguments: Any, **keywords: Any) -> Any:
        nonlocal called
        if not called:
            called = True
            try:
                others = {name: another(value) for name, value in keywords.items()}
                return helper(*map(another, arguments), **others)
            except Exception:  # the helper does not support other arguments
                return helper(*arguments, **keywords)
        return helper(*arguments, **keywords)

    return answer


def _argument(answer: Any, arguments: list[Any]) -> Any:
    if isinstance(answer, list | tuple) and len(answer) == len(arguments) > 1:
        return arguments if isinstance(answer, list) else tuple(arguments)
    return arguments[0] if arguments else None


def _copied(value: Any) -> Any:
    """Return a copy, so that the program's changes to a value do not affect later ones."""
    try:
        return copy.deepcopy(value)
    except Exception:  # raised by the value's methods
        return value


def _replacing(make: Callable[[], Replacement]) -> Callable[[Helper], Helper]:
    """Return a decorator that replaces a helper's results, except in its recursive calls."""

    def replace(helper: Helper) -> Helper:
        running, replaced_by = False, make()

        @functools.wraps(helper)
        def replaced(*arguments: Any, **keywords: Any) -> Any:
            nonlocal running
            if running:
                return helper(*arguments, **keywords)
            running, before = True, [_copied(value) for value in (*arguments, *keywords.values())]
            try:
                result = helper(*arguments, **keywords)
            finally:
                running = False
            return replaced_by(result, before)

        return replaced

    return replace


_constantly = _replacing(_constant)
REPLACEMENTS = {
    "another": _replacing(lambda: lambda answer, _: another(answer)),
    "none": _replacing(lambda: lambda *_: None),
    "constant": _constantly,
    "constant_elsewhere": lambda helper: _constantly(_elsewhere(helper)),
    "argument": _replacing(lambda: _argument),
    "last_argument": _replacing(lambda: lambda _, arguments: arguments[-1] if arguments else None),
    HANDED_ON: lambda helper: helper,
}


def replacements(tests: int) -> list[str]:
    """Return the names of the replacements to try on a program with this many tests."""
    constant = "constant" if tests > 1 else "constant_elsewhere"
    return ["another", "none", constant, "argument", "last_argument"]
