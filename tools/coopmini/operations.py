"""The parts of CoopMini problems: kinds of input, and filters, maps and reductions on them.

A problem reads a collection and applies, in this order, a filter, a map and a reduction; one of
the three may be missing. A long one maps once more what the map gave. Operations come in groups
that differ by a constant only (``x > 3``, ``x > 4``): a draw picks a group first, so that no group
is frequent because its constants are many.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Groups = tuple[tuple["Operation", ...], ...]

# fmt: off
WORDS = (
    "ant", "apple", "bat", "bee", "cat", "door", "eagle", "egg", "fig", "goat",
    "hat", "ink", "jam", "kiwi", "leaf", "lemon", "map", "moon", "nest", "nut",
    "oak", "owl", "pear", "river", "rose", "sea", "stone", "sun", "tea", "tree",
)
# fmt: on
LETTERS = "aeinorst"


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a problem, in words and in code."""

    phrase: str
    code: str  # over the element's names (filter, map), over `y` (second map) or `ys` (reduction)
    gives: str = ""  # maps: the type of the result; reduction: the type of element it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A kind of input: how its elements are named and walked through, and what is done to them."""

    name: str
    param: str  # the entry point's parameter
    element: str  # what one element is called, as a target and as arguments
    noun: str  # the elements in words, where nothing is filtered
    items: str  # how to walk through a collection of them: "{}" or "{}.items()"
    filtered: str  # the collection of those elements of {source} that pass {condition}
    element_type: str | None  # type that a reduction without a map sees; None: it needs a map
    filters: Groups
    maps: Groups
    sample: Callable[[random.Random, int], Any]  # an input with about so many elements


def _operation(phrase: str, code: str, gives: str = "") -> tuple[Operation, ...]:
    return (Operation(phrase, code, gives),)


def _each(phrase: str, code: str, constants: Any, gives: str = "") -> tuple[Operation, ...]:
    return tuple(
        Operation(phrase.replace("#", str(c)), code.replace("#", str(c)), gives) for c in constants
    )


REDUCTIONS: Groups = (
    _operation("Sum of {}", "sum(ys)", "int"),
    _operation("Largest of {}", "max(ys)", "int"),
    _operation("Smallest of {}", "min(ys)", "int"),
    _operation("Spread of {}", "max(ys) - min(ys)", "int"),
    _operation("Floored mean of {}", "sum(ys) // len(ys)", "int"),
    _operation("Sort {}", "sorted(ys)", "int"),
    _operation("Number of distinct {}", "len(set(ys))", "int"),
    _operation("Join {}", '"".join(ys)', "str"),
    _operation("Join by dashes {}", '"-".join(ys)', "str"),
    _operation("Sort {}", "sorted(ys)", "str"),
    _operation("Longest of {}", "max(ys, key=len)", "str"),
    _operation("Number of distinct {}", "len(set(ys))", "str"),
    _operation("Last of {}", "ys[-1]", "int"),
    _operation("Reverse {}", "ys[::-1]", "str"),
    _operation("Last of {}", "ys[-1]", "str"),
)

_DIGITS = range(1, 10)

THENS: Groups = (  # they keep the type
    _operation("squared", "y * y", "int"),
    _operation("doubled", "y * 2", "int"),
    _operation("negated", "-y", "int"),
    _each("plus #", "y + #", _DIGITS, "int"),
    _each("minus #", "y - #", _DIGITS, "int"),
    _each("times #", "y * #", range(3, 10), "int"),
    _each("modulo #", "y % #", range(3, 10), "int"),
    _operation("in capitals", "y.upper()", "str"),
    _operation("reversed", "y[::-1]", "str"),
    _operation("doubled", "y * 2", "str"),
    _operation("without its last letter", "y[:-1]", "str"),
    _each("plus letter #", 'y + "#"', LETTERS, "str"),
    _each("after letter #", '"#" + y', LETTERS, "str"),
)


def _integers(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(-9, 19) for _ in range(size)]


def _words(rng: random.Random, size: int) -> list[str]:
    return rng.sample(WORDS, size)


def _pairs(rng: random.Random, size: int) -> list[tuple[int, int]]:
    return [(rng.randint(0, 12), rng.randint(0, 12)) for _ in range(size)]


def _counts(rng: random.Random, size: int) -> dict[str, int]:
    return {word: rng.randint(0, 12) for word in _words(rng, size)}


INTEGERS = Domain(
    name="integers",
    param="xs",
    element="x",
    noun="numbers",
    items="{}",
    filtered="[x for x in {source} if {condition}]",
    element_type="int",
    filters=(
        _operation("odd numbers", "x % 2 == 1"),
        _operation("even numbers", "x % 2 == 0"),
        _operation("positive numbers", "x > 0"),
        _operation("negative numbers", "x < 0"),
        _each("numbers above #", "x > #", _DIGITS),
        _each("numbers below #", "x < #", _DIGITS),
        _each("numbers other than #", "x != #", _DIGITS),
        _each("multiples of #", "x % # == 0", range(3, 8)),
    ),
    maps=(
        _operation("squared", "x * x", "int"),
        _operation("doubled", "x * 2", "int"),
        _operation("halved", "x // 2", "int"),
        _operation("negated", "-x", "int"),
        _operation("made positive", "abs(x)", "int"),
        _each("plus #", "x + #", _DIGITS, "int"),
        _each("minus #", "x - #", _DIGITS, "int"),
        _each("times #", "x * #", range(3, 10), "int"),
        _each("modulo #", "x % #", range(3, 10), "int"),
    ),
    sample=_integers,
)

STRINGS = Domain(
    name="strings",
    param="words",
    element="w",
    noun="words",
    items="{}",
    filtered="[w for w in {source} if {condition}]",
    element_type="str",
    filters=(
        _each("words longer than #", "len(w) > #", range(2, 5)),
        _each("words shorter than #", "len(w) < #", range(4, 6)),
        _each("words starting with #", 'w[0] == "#"', LETTERS),
        _each("words ending with #", 'w[-1] == "#"', LETTERS),
        _each("words with #", '"#" in w', LETTERS),
        _each("words without #", '"#" not in w', LETTERS),
    ),
    maps=(
        _operation("in capitals", "w.upper()", "str"),
        _operation("reversed", "w[::-1]", "str"),
        _operation("doubled", "w * 2", "str"),
        _operation("without its first letter", "w[1:]", "str"),
        _operation("by length", "len(w)", "int"),
        _each("plus letter #", 'w + "#"', LETTERS, "str"),
        _each("after letter #", '"#" + w', LETTERS, "str"),
    ),
    sample=_words,
)

PAIRS = Domain(
    name="pairs",
    param="pairs",
    element="a, b",
    noun="pairs",
    items="{}",
    filtered="[(a, b) for a, b in {source} if {condition}]",
    element_type=None,
    filters=(
        _operation("rising pairs", "a < b"),
        _operation("falling pairs", "a > b"),
        _each("pairs starting above #", "a > #", _DIGITS),
        _each("pairs starting below #", "a < #", _DIGITS),
        _each("pairs ending above #", "b > #", _DIGITS),
        _each("pairs ending below #", "b < #", _DIGITS),
    ),
    maps=(
        _operation("multiplied", "a * b", "int"),
        _operation("added", "a + b", "int"),
        _operation("subtracted", "a - b", "int"),
        _operation("by its first", "a", "int"),
        _operation("by its second", "b", "int"),
        _operation("by its larger", "max(a, b)", "int"),
        _each("added plus #", "a + b + #", _DIGITS, "int"),
        _each("multiplied plus #", "a * b + #", _DIGITS, "int"),
    ),
    sample=_pairs,
)

DICTIONARIES = Domain(
    name="dictionaries",
    param="d",
    element="k, v",
    noun="items",
    items="{}.items()",
    filtered="{{k: v for k, v in {source}.items() if {condition}}}",
    element_type=None,
    filters=(
        _operation("odd items", "v % 2 == 1"),
        _operation("even items", "v % 2 == 0"),
        _each("items above #", "v > #", _DIGITS),
        _each("items below #", "v < #", _DIGITS),
        _each("items with # in the key", '"#" in k', LETTERS),
        _each("items with keys longer than #", "len(k) > #", range(2, 5)),
    ),
    maps=(
        _operation("by key", "k", "str"),
        _operation("by value", "v", "int"),
        _operation("doubled", "v * 2", "int"),
        _operation("squared", "v * v", "int"),
        _each("plus #", "v + #", _DIGITS, "int"),
        _each("minus #", "v - #", _DIGITS, "int"),
        _each("times #", "v * #", range(3, 10), "int"),
    ),
    sample=_counts,
)

DOMAINS = (INTEGERS, STRINGS, PAIRS, DICTIONARIES)
