"""The parts of `builtin:functions`: inputs, filters, maps and reductions, in code and in words.

An element is called `x` in the code of maps; a reduction's code reads the list `ys`. Filters and
maps that differ by a number or a letter only are of one kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# fmt: off
WORDS = (
    "apple", "arm", "bean", "bird", "boat", "book", "cake", "car", "cat", "cloud", "deer", "dog",
    "door", "egg", "end", "fish", "fox", "gate", "goat", "hat", "hill", "ice", "ink", "jar", "key",
    "lamp", "leaf", "moon", "nest", "nut", "oak", "olive", "owl", "pear", "pen", "rain", "river",
    "road", "rose", "sea", "ship", "star", "stone", "sun", "tea", "tiger", "tree", "wind",
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A condition on an element, as an adjective, after the noun, or as a relative clause."""

    kind: str
    code: str
    that: str  # "that are even"
    adjective: str = ""  # "even"
    after: str = ""  # "greater than 5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """The transformation of an element: as a noun ("the squares of {}") and as a step."""

    kind: str
    code: str
    noun: str
    step: str
    gives: str = "int"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The reduction of the list ``ys``: as sentences, and as a last step.

    ``empty``: in words, the result of an empty list. ``weight``: how often it is drawn.
    """

    kind: str
    code: str
    sentences: tuple[str, ...]
    steps: tuple[str, ...]
    empty: str = ""
    weight: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A kind of input and the elements that it holds."""

    family: str
    parameter: str
    loop: str  # what stands behind `for`
    item: str  # an element, in the loop's names
    type: str  # of an element
    noun: str  # elements, in words
    places: tuple[str, ...]  # where they are, in words
    filters: tuple[Filter, ...]
    sample: Callable[[random.Random], Any]
    trivial: tuple[str, ...]  # programs that are too simple, over `parameter`


def _that(kind: str, code: str, that: str) -> Filter:
    after = that.removeprefix("that are ") if that.startswith("that are ") else ""
    return Filter(kind=kind, code=code, that=that, after=after)


def _adjective(word: str, code: str) -> Filter:
    return Filter(kind=word, code=code, that=f"that are {word}", adjective=word)


def _each(make: Callable[[Any], Filter], values: Iterable[Any]) -> tuple[Filter, ...]:
    return tuple(make(value) for value in values)


def number_filters(x: str = "x") -> tuple[Filter, ...]:
    """Return conditions on a number that is called ``x``."""
    return (
        _adjective("even", f"{x} % 2 == 0"),
        _adjective("odd", f"{x} % 2 == 1"),
        _adjective("positive", f"{x} > 0"),
        _adjective("negative", f"{x} < 0"),
        *_each(lambda n: _that("greater", f"{x} > {n}", f"that are greater than {n}"), range(2, 9)),
        *_each(lambda n: _that("less", f"{x} < {n}", f"that are less than {n}"), range(1, 9)),
        *_each(lambda n: _that("least", f"{x} >= {n}", f"that are at least {n}"), range(2, 9)),
        *_each(lambda n: _that("most", f"{x} <= {n}", f"that are at most {n}"), range(1, 9)),
        *_each(
            lambda n: _that("divisible", f"{x} % {n} == 0", f"that are divisible by {n}"),
            (3, 4, 5),
        ),
        *_each(
            lambda n: _that("indivisible", f"{x} % {n} != 0", f"that are not divisible by {n}"),
            (3, 4, 5),
        ),
        *_each(lambda n: _that("other", f"{x} != {n}", f"that are not equal to {n}"), range(1, 6)),
        *_each(
            lambda n: _that(
                "between", f"{n} <= {x} <= {n + 6}", f"that are at least {n} and at most {n + 6}"
            ),
            range(-3, 6),
        ),
    )


def word_filters(x: str = "x", whose: str = "that") -> tuple[Filter, ...]:
    """Return conditions on a word that is called ``x``; ``whose``: how its clauses begin."""
    return (
        *_each(
            lambda c: _that("starts", f'{x}.startswith("{c}")', f"{whose} start with {c!r}"),
            "bcgorst",
        ),
        *_each(
            lambda c: _that("ends", f'{x}.endswith("{c}")', f"{whose} end with {c!r}"), "eklnrt"
        ),
        *_each(lambda c: _that("contains", f'"{c}" in {x}', f"{whose} contain {c!r}"), "aeior"),
        *_each(
            lambda c: _that("lacks", f'"{c}" not in {x}', f"{whose} do not contain {c!r}"), "aeior"
        ),
        *_each(
            lambda n: _that("longer", f"len({x}) > {n}", f"{whose} have more than {n} letters"),
            (3, 4),
        ),
        *_each(
            lambda n: _that("shorter", f"len({x}) < {n}", f"{whose} have fewer than {n} letters"),
            (4, 5),
        ),
        *_each(
            lambda n: _that("exactly", f"len({x}) == {n}", f"{whose} have exactly {n} letters"),
            (3, 4),
        ),
        _that("vowel", f'{x}[0] in "aeiou"', f"{whose} start with a vowel"),
    )


CHARACTER_FILTERS = (
    Filter(kind="vowels", code='x in "aeiou"', that="that are lowercase vowels"),
    Filter(kind="no_vowels", code='x not in "aeiou"', that="that are not lowercase vowels"),
    Filter(kind="digits", code="x.isdigit()", that="that are digits"),
    Filter(kind="no_digits", code="not x.isdigit()", that="that are not digits"),
    Filter(kind="upper", code="x.isupper()", that="that are uppercase letters"),
    Filter(kind="lower", code="x.islower()", that="that are lowercase letters"),
    Filter(kind="letters", code="x.isalpha()", that="that are letters"),
    *_each(lambda c: _that("not", f'x != "{c}"', f"that are not {c!r}"), "aeo "),
    *_each(lambda c: _that("after", f'x > "{c}"', f"that come after {c!r} in the alphabet"), "gm"),
)

PAIR_FILTERS = (
    _that("rising", "x[0] < x[1]", "whose first number is smaller than the second"),
    _that("falling", "x[0] > x[1]", "whose first number is larger than the second"),
    _that("even_sum", "(x[0] + x[1]) % 2 == 0", "whose sum is even"),
    *_each(lambda n: _that("sum", f"x[0] + x[1] > {n}", f"whose sum is greater than {n}"), (8, 10)),
    *_each(lambda n: _that("first", f"x[0] > {n}", f"whose first number is above {n}"), (4, 6)),
    *_each(lambda n: _that("second", f"x[1] < {n}", f"whose second number is below {n}"), (5, 7)),
    _that("even_first", "x[0] % 2 == 0", "whose first number is even"),
    _that("odd_second", "x[1] % 2 == 1", "whose second number is odd"),
)

NO_MAP = Map(kind="none", code="x", noun="{}", step="", gives="")


def _map(kind: str, code: str, noun: str, step: str, gives: str = "int") -> Map:
    return Map(kind=kind, code=code, noun=f"{noun} {{}}", step=step, gives=gives)


MAPS: dict[str, tuple[Map, ...]] = {
    "int": (
        _map("square", "x * x", "the squares of", "square each of them"),
        _map("double", "x * 2", "the doubles of", "double each of them"),
        _map("abs", "abs(x)", "the absolute values of", "take the absolute value of each"),
        _map("cube", "x ** 3", "the cubes of", "cube each of them"),
        _map("negate", "-x", "the negatives of", "negate each of them"),
        _map("half", "x // 2", "the halves (rounded down) of", "halve each, rounding down"),
        *(
            _map("times", f"x * {n}", f"{n} times each of", f"multiply each by {n}")
            for n in (3, 4, 5)
        ),
        *(
            _map("mod", f"x % {n}", f"the remainders modulo {n} of", f"take each modulo {n}")
            for n in (3, 4, 5)
        ),
        *(_map("plus", f"x + {n}", f"{n} plus each of", f"add {n} to each") for n in range(1, 6)),
        *(
            _map("minus", f"{n} - x", f"{n} minus each of", f"subtract each of them from {n}")
            for n in (5, 10)
        ),
    ),
    "str": (
        _map("length", "len(x)", "the lengths of", "take the length of each"),
        _map("upper", "x.upper()", "the uppercase versions of", "convert each to uppercase", "str"),
        _map("reverse", "x[::-1]", "the reversals of", "reverse each of them", "str"),
        _map("first", "x[0]", "the first letters of", "take the first letter of each", "str"),
        _map("last", "x[-1]", "the last letters of", "take the last letter of each", "str"),
        _map("title", "x.title()", "the capitalized versions of", "capitalize each of them", "str"),
        _map("tail", "x[1:]", "the rests after the first letter of", "remove the first letter of "
             "each", "str"),
        *(
            _map(f"count_{c}", f'x.count("{c}")', f"the numbers of times {c!r} occurs in each of",
                 f"count how often {c!r} occurs in each")
            for c in "ae"
        ),
    ),
    "char": (
        _map("upper", "x.upper()", "the uppercase versions of", "convert each to uppercase", "str"),
        _map("double", "x * 2", "the doubles of", "write each twice", "str"),
        _map("mark", 'x + "."', "a dot after each of", "put a dot after each", "str"),
    ),
    "pair": (
        _map("sum", "x[0] + x[1]", "the sums of", "add the two numbers of each"),
        _map("product", "x[0] * x[1]", "the products of", "multiply the two numbers of each"),
        _map("first", "x[0]", "the first numbers of", "take the first number of each"),
        _map("second", "x[1]", "the second numbers of", "take the second number of each"),
        _map("larger", "max(x)", "the larger numbers of", "take the larger number of each"),
        _map("difference", "x[0] - x[1]", "the differences (first minus second) of",
             "subtract the second number of each from the first"),
    ),
}  # fmt: skip


def _reduction(
    kind: str,
    code: str,
    sentences: tuple[str, ...],
    steps: tuple[str, ...],
    empty: str = "",
    weight: int = 3,
) -> Reduction:
    return Reduction(
        kind=kind, code=code, sentences=sentences, steps=steps, empty=empty, weight=weight
    )


def _values(empty: str, zero: str, *, strings: bool) -> tuple[Reduction, ...]:
    """Return the reductions of numbers, or of strings."""
    order = " in alphabetical order" if strings else ""
    largest, smallest = (
        ("alphabetically last", "alphabetically first") if strings else ("largest", "smallest")
    )
    return (
        _reduction(
            "max", f"max(ys, default={zero})",
            (f"Return the {largest} of {{}}", f"Find the {largest} of {{}}"),
            (f"return the {largest}",), empty,
        ),
        _reduction(
            "min", f"min(ys, default={zero})",
            (f"Return the {smallest} of {{}}", f"Find the {smallest} of {{}}"),
            (f"return the {smallest}",), empty,
        ),
        _reduction(
            "sorted", "sorted(ys)",
            ("Return a sorted list of {}", f"Return {{}}{order or ' in ascending order'}",
             "List {} in sorted order"),
            ("return a sorted list", f"sort them{order}"),
        ),
        _reduction(
            "descending", "sorted(ys, reverse=True)",
            ("Return {} sorted in descending order", "Sort {} in reverse order"),
            ("sort them in descending order", "return them sorted in reverse order"),
        ),
        _reduction(
            "distinct", "len(set(ys))",
            ("Return the number of distinct values among {}",
             "Count the different values among {}"),
            ("return the number of distinct values", "count the different values"),
        ),
    )  # fmt: skip


SEQUENCES = (  # of whatever is in the list
    _reduction(
        "count", "len(ys)", ("Return the number of {}", "Count {}"),
        ("return how many there are", "count them"),
    ),
    _reduction(
        "list", "ys", ("Return a list of {}", "Return {} as a list", "List {}"),
        ("return the list", "return them as a list"), weight=2,
    ),
    _reduction(
        "backwards", "ys[::-1]",
        ("Return {} in reverse order", "List {} from last to first"),
        ("return the list backwards", "return them from last to first"), weight=1,
    ),
    _reduction(
        "last", "ys[-1:]",
        ("Return a list with only the last of {}",),
        ("return a list with only the last",), "an empty list", weight=1,
    ),
    _reduction(
        "two", "ys[:2]",
        ("Return at most the first two of {}",
         "List the first two of {} (fewer if there are fewer)"),
        ("return at most the first two",), weight=1,
    ),
)  # fmt: skip
REDUCTIONS: dict[str, tuple[Reduction, ...]] = {
    "int": (
        _reduction(
            "sum", "sum(ys)", ("Return the sum of {}", "Add up {}", "Compute the total of {}"),
            ("return the sum", "add them up", "return their total"),
        ),
        *_values("0", "0", strings=False),
        *SEQUENCES,
    ),
    "str": (
        _reduction(
            "join", '"".join(ys)', ("Join {} into one string", "Return {} joined together"),
            ("join them into one string", "return them joined together"),
        ),
        _reduction(
            "dashes", '"-".join(ys)', ("Join {} with dashes", "Return {} joined by dashes"),
            ("join them with dashes",),
        ),
        *_values("an empty string", '""', strings=True),
        *SEQUENCES,
    ),
    "pair": SEQUENCES,
}  # fmt: skip
REDUCTIONS["char"] = REDUCTIONS["str"]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-9, 15) for _ in range(rng.randint(3, 5))]


def _word_list(rng: random.Random) -> list[str]:
    return [rng.choice(WORDS) for _ in range(rng.randint(3, 4))]


def _sentence(rng: random.Random) -> str:
    return " ".join(_word_list(rng))


def _text(rng: random.Random) -> str:
    words = [word.title() if rng.random() < 0.4 else word for word in rng.sample(WORDS, 2)]
    words.insert(rng.randrange(3), str(rng.randint(10, 99)))
    return " ".join(words)


def _pairs(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randint(0, 12), rng.randint(0, 12)) for _ in range(rng.randint(3, 4))]


def _dictionary(rng: random.Random) -> dict[str, int]:
    return {word: rng.randint(-5, 12) for word in rng.sample(WORDS, rng.randint(3, 4))}


_OF_LISTS = (
    "{}", "list({})", "len({})", "{}[0]", "{}[-1]", "{}[:1]", "{}[:2]", "{}[-1:]", "{}[::-1]",
    "{}[1:]", "[x for x in {} if x]", "[len(x) for x in {}]", "sum(len(x) for x in {})",
    "sorted({})",
    "sorted({})[::-1]", "sorted(set({}))", "len(set({}))", "max({})", "min({})", "sum({})",
    '"".join({})', '"-".join({})',
)  # fmt: skip


def _trivial(*lists: str, others: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (*others, *(program.format(each) for each in lists for program in _OF_LISTS))


# Level starter: few parts, and one wording for each.
STARTER_KINDS = {
    "filter": ("even", "odd", "positive", "negative", "greater", "less", "divisible"),
    "map": ("none", "square", "double", "abs", "cube"),
    "reduction": ("sum", "count", "max", "min", "sorted"),
}
STARTER = Source(
    family="numbers", parameter="xs", loop="x in xs", item="x", type="int", noun="numbers",
    places=("in the list xs",), sample=_numbers, trivial=_trivial("xs"),
    filters=tuple(f for f in number_filters() if f.kind in STARTER_KINDS["filter"]),
)  # fmt: skip
FAMILIES: dict[str, tuple[Source, ...]] = {
    "numbers": (
        Source(
            family="numbers", parameter="xs", loop="x in xs", item="x", type="int", noun="numbers",
            places=("in the list xs", "in xs", "of the list xs"), filters=number_filters(),
            sample=_numbers, trivial=_trivial("xs"),
        ),
    ),
    "words": (
        Source(
            family="words", parameter="words", loop="x in words", item="x", type="str",
            noun="words", places=("in the list words", "of the list words"),
            filters=word_filters(), sample=_word_list, trivial=_trivial("words"),
        ),
    ),
    "dictionaries": (
        Source(
            family="dictionaries", parameter="d", loop="k, v in d.items()", item="k", type="str",
            noun="keys", places=("of the dictionary d", "in the dictionary d"),
            filters=tuple(
                _that(f"value_{f.kind}", f.code, f"whose values are {f.adjective or f.after}")
                for f in number_filters("v")
            ),
            sample=_dictionary, trivial=_trivial("d", "list(d.values())"),
        ),
        Source(
            family="dictionaries", parameter="d", loop="k, v in d.items()", item="v", type="int",
            noun="values", places=("of the dictionary d", "in the dictionary d"),
            filters=(*number_filters("v"), *word_filters("k", "whose keys")),
            sample=_dictionary, trivial=_trivial("d", "list(d.values())"),
        ),
    ),
    "texts": (
        Source(
            family="texts", parameter="text", loop="x in text.split()", item="x", type="str",
            noun="words", places=("of the sentence text", "in the string text"),
            filters=word_filters(), sample=_sentence, trivial=_trivial("text", "text.split()"),
        ),
        Source(
            family="texts", parameter="text", loop="x in text", item="x", type="char",
            noun="characters", places=("of the string text", "in the text"),
            filters=CHARACTER_FILTERS, sample=_text,
            trivial=_trivial("text", "text.split()", others=("text.upper()", "text.lower()")),
        ),
    ),
    "pairs": (
        Source(
            family="pairs", parameter="pairs", loop="x in pairs", item="x", type="pair",
            noun="pairs", places=("in the list pairs", "of the list pairs"), filters=PAIR_FILTERS,
            sample=_pairs,
            trivial=_trivial("pairs", "[a for a, b in pairs]", "[b for a, b in pairs]"),
        ),
    ),
}  # fmt: skip
