"""Helpers whose results are replaced, to see whether a program needs them.

A program that passes all its tests is run again with each helper's result replaced: by another
value of its type, by None, by one constant among its own answers, and by its own argument (the
first, or all of them where its answer has as many items; then the last). It needs the helper if
none of the runs passes. The constant is its first answer; where there is one test only, which that
one may pass by itself, its answer to other arguments. To see whether it needs the entry point, each
helper takes the entry point's place as it is (``HANDED_ON``).

Standard library only: this is loaded in the sandbox, beside the program. It measures; it does not
guard: a program that looks at how its helper was made can tell that it is replaced.
"""

from __future__ import annotations

import codecs
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

HANDED_ON = "handed_on"
NAME = "__another__"  # under which a program's text finds the replacement, while it is loaded
DEPTH = 20  # of nested values
MAX_ITEMS = 10_000  # of an iterator that is given again

Helper = Callable[..., Any]
Replacement = Callable[[Any, list[Any]], Any]  # of a helper's answer, beside its arguments


def another(value: Any, depth: int = DEPTH) -> Any:
    """Return a different value of the same type, or None if there is no known one.

    Numbers change sign, parity and truth; what is in a container changes, its last item too, and so
    do its length and the number of distinct items, but for a tuple, which is unpacked. It raises
    nothing.
    """
    if value is None or not depth:
        return None
    try:
        return _other(value, depth - 1)
    except Exception:  # of a value's own methods
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
    return 1 - value  # Fraction, Decimal and their like


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
            except Exception:  # other arguments than it is made for
                return helper(*arguments, **keywords)
        return helper(*arguments, **keywords)

    return answer


def _argument(answer: Any, arguments: list[Any]) -> Any:
    if isinstance(answer, list | tuple) and len(answer) == len(arguments) > 1:
        return arguments if isinstance(answer, list) else tuple(arguments)
    return arguments[0] if arguments else None


def _copied(value: Any) -> Any:
    """Return a copy, so that a program's changes to a value do not affect the next one."""
    try:
        return copy.deepcopy(value)
    except Exception:  # of a value's own methods
        return value


def _replacing(make: Callable[[], Replacement]) -> Callable[[Helper], Helper]:
    """Return helper → the helper with its results replaced, except those passed to itself."""

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
    """Return the replacements to try on a program that passes this many tests."""
    constant = "constant" if tests > 1 else "constant_elsewhere"
    return ["another", "none", constant, "argument", "last_argument"]
