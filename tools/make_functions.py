"""Makes the problems of `builtin:functions`: small functions, described as a person would.

    python tools/make_functions.py                       # writes the shipped files again
    python tools/make_functions.py --seed 7 --out FOLDER # other problems

Rows have HumanEval's columns, and: ``level`` (starter: few kinds of parts, one wording of each;
easy: a filter and a reduction; medium: a filter, a map and a reduction; hard: a function of the
results of another), ``family`` (kind of input),
``parts`` (what its filter, map, second filter (``then``) and reduction do, whatever their numbers
and letters), ``divisible`` (whether aux and main can both have something to do) and ``team`` (what
they then return; main has aux's result as ``part``).

Some combinations of a filter, a map and a reduction are held out: the splits ``train`` and ``eval``
share none, whatever their seeds. The split ``transfer`` has another family. In every problem, no
program of ``Source.trivial`` and no constant passes all tests, and neither does the solution
without one or more of its parts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.builtin import FUNCTIONS, FUNCTIONS_STARTER
from tools.function_parts import (
    FAMILIES,
    MAPS,
    NO_MAP,
    REDUCTIONS,
    STARTER,
    STARTER_KINDS,
    Filter,
    Map,
    Reduction,
    Source,
    number_filters,
    word_filters,
)

TRANSFER = "pairs"  # the family of the split of that name
WEIGHTS = {"numbers": 8, "words": 3, "dictionaries": 2, "texts": 2}  # how often, in the others
SIZES = {  # split → problems of each level
    "train": {"easy": 416, "medium": 416, "hard": 128},
    "eval": {"easy": 64, "medium": 64, "hard": 16},
    "transfer": {"easy": 24, "medium": 24, "hard": 8},
}
STARTER_SIZES = {"train": {"starter": 256}, "eval": {"starter": 48}}
HELD_OUT = 0.15  # share of combinations
NAMES = ("solve", "compute", "answer", "process", "run", "find", "build", "make", "get", "work")
EXAMPLES, TESTS = 2, 6
MAX_EQUAL = 2  # tests with the same answer
MIN_FAILED = 2  # tests that fail with a trivial program, or without a part
DRAWS = 40  # of examples and tests, before a problem is given up
FRUITLESS = 5000  # problems that are given up in a row

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A filter, a map, a second filter of what the map gave, and a reduction."""

    source: Source
    filter: Filter
    map: Map
    then: Filter | None
    reduction: Reduction

    @property
    def kinds(self) -> dict[str, str]:
        """Return the kinds of the parts that there are."""
        kinds = {"filter": self.filter.kind}
        if self.map is not NO_MAP:
            kinds["map"] = self.map.kind
        if self.then is not None:
            kinds["then"] = self.then.kind
        return kinds | {"reduction": self.reduction.kind}

    @property
    def combination(self) -> str:
        """Return what the splits ``train`` and ``eval`` do not share."""
        return f"{self.filter.kind}/{self.map.kind}/{self.reduction.kind}"

    @property
    def parts(self) -> dict[str, str]:
        """Return the code of the parts that there are."""
        item = self.source.item
        parts = {"filter": self.filter.code}
        if self.map is not NO_MAP:
            parts["map"] = re.sub(r"\bx\b", item, self.map.code)
        if self.then is not None:
            parts["then"] = self.then.code
        if self.reduction.kind != "list":
            parts["reduction"] = self.reduction.code
        return parts


def expression(problem: Problem, parts: dict[str, str]) -> str:
    """Return the program that has these of the problem's parts, as one expression."""
    source = problem.source
    condition = f" if {parts['filter']}" if "filter" in parts else ""
    ys = f"[{parts.get('map', source.item)} for {source.loop}{condition}]"
    if "then" in parts:
        ys = f"[y for y in {ys} if {parts['then']}]"
    return re.sub(r"\bys\b", lambda _: ys, parts.get("reduction", "ys"))


def program(source: Source, code: str) -> Callable[[Any], Any]:
    """Return a program as a function; it returns ``program`` itself where the code raises."""
    compiled = compile(f"lambda {source.parameter}: {code}", "program", "eval")
    function = eval(compiled, {})  # rendered from our own templates

    def safely(value: Any) -> Any:
        try:
            return function(value)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError):
            return program

    return safely


def too_simple(problem: Problem) -> Iterator[Callable[[Any], Any]]:
    """Yield the programs that must not pass: trivial ones, and the solution without some parts."""
    for code in problem.source.trivial:
        yield program(problem.source, code)
    for count in range(len(problem.parts)):
        for chosen in combinations(problem.parts.items(), count):
            yield program(problem.source, expression(problem, dict(chosen)))


def find_cases(problem: Problem, rng: random.Random) -> list[tuple[Any, Any]] | None:
    """Return examples and tests that tell the solution from simpler programs, or None."""
    solve = program(problem.source, expression(problem, problem.parts))
    wrong = list(too_simple(problem))
    for _ in range(DRAWS):
        inputs = [problem.source.sample(rng) for _ in range(EXAMPLES + TESTS)]
        answers = [solve(value) for value in inputs]
        counts = Counter(map(repr, answers[EXAMPLES:]))
        if len({*map(repr, inputs)}) < len(inputs) or answers[0] == answers[1]:
            continue
        if max(counts.values()) > MAX_EQUAL:
            continue
        tests = [*zip(inputs, answers, strict=True)][EXAMPLES:]
        if all(sum(f(v) != answer for v, answer in tests) >= MIN_FAILED for f in wrong):
            return [*zip(inputs, answers, strict=True)]
    return None


def _noun_phrase(problem: Problem, rng: random.Random) -> str:
    source, condition = problem.source, problem.filter
    place = rng.choice(source.places)
    if source is STARTER:
        words = ("the", condition.adjective, source.noun, condition.after, place)
        return " ".join(word for word in words if word)
    phrases = [f"the {source.noun} {place} {condition.that}"]
    if condition.adjective:
        phrases += [f"{the} {condition.adjective} {source.noun} {place}" for the in ("the", "all")]
    elif condition.after:
        phrases += [f"the {source.noun} {condition.after} {place}"]
        phrases += [f"all {source.noun} {place} {condition.that}"]
    else:
        phrases += [f"those {source.noun} {place} {condition.that}"]
    return rng.choice(phrases)


def sentence(problem: Problem, rng: random.Random) -> str:
    """Return the problem in words: in one phrase, or step by step."""
    elements, reduction = _noun_phrase(problem, rng), problem.reduction
    step, mapped = rng.choice(reduction.steps), problem.map.step
    if problem.then is not None:
        text = f"{rng.choice(('Take', 'Pick'))} {elements} and {mapped}. "
        text += f"Of the results, keep those {problem.then.that} and {step}"
    elif problem.source is STARTER:
        text = reduction.sentences[0].format(problem.map.noun.format(elements))
    elif rng.random() < (0.4 if mapped else 0.2):
        text = f"{rng.choice(('Take', 'Pick', 'Keep'))} {elements}"
        text += f", {mapped} and {step}" if mapped else f" and {step}"
    else:
        text = rng.choice(reduction.sentences).format(problem.map.noun.format(elements))
    if reduction.empty:
        clause = f"{reduction.empty} if there are none"
        forms = (f", or {clause}", f" ({clause})")
        text += forms[0] if problem.source is STARTER else rng.choice(forms)
    return f"{text}."


def team(problem: Problem) -> list[str]:
    """Return what aux returns, and what main returns of aux's result, ``part``.

    Aux has all but the last part, as far as there are two.
    """
    parts = problem.parts
    mains = {"then", "reduction"} & parts.keys() or {"map"} & parts.keys()
    helper = expression(problem, {k: code for k, code in parts.items() if k not in mains})
    rest = "part"
    if "map" in mains:
        rest = f"[{parts['map']} for {problem.source.item} in part]"
    if "then" in mains:
        rest = f"[y for y in part if {parts['then']}]"
    if "reduction" in mains:
        rest = re.sub(r"\bys\b", lambda _: rest, parts["reduction"])
    return [helper, rest]


def make_row(problem: Problem, level: str, rng: random.Random) -> Row | None:
    """Return a row, or None where a simpler program would do."""
    cases = find_cases(problem, rng)
    if cases is None:
        return None
    name, parameter = rng.choice(NAMES), problem.source.parameter
    lines = [f"def {name}({parameter}):", f'    """{sentence(problem, rng)}']
    for value, answer in cases[:EXAMPLES]:
        lines += [f"    >>> {name}({value!r})", f"    {answer!r}"]
    tests = [f"    assert f({v!r}) == {answer!r}" for v, answer in cases[EXAMPLES:]]
    return {
        "prompt": "\n".join([*lines, '    """', ""]),
        "test": "\n".join(["def check(f):", *tests, ""]),
        "entry_point": name,
        "canonical_solution": f"    return {expression(problem, problem.parts)}\n",
        "level": level,
        "family": problem.source.family,
        "parts": problem.kinds,
        "divisible": len(problem.parts) > 1,
        "team": team(problem),
    }


def is_held_out(problem: Problem) -> bool:
    """Return whether a problem's combination is kept for the split ``eval``, with all seeds."""
    return random.Random(f"functions/0/{problem.combination}").random() < HELD_OUT


def draw(level: str, families: dict[str, int], rng: random.Random) -> Problem:
    """Return a problem; kinds of one part are equally likely."""
    if level == "starter":
        return draw_starter(rng)
    (family,) = rng.choices([*families], [*families.values()])
    source = rng.choice(FAMILIES[family])
    change = NO_MAP if level == "easy" else _of_a_kind(MAPS[source.type], rng)
    kind = source.type if change is NO_MAP else change.gives
    then = None
    if level == "hard":
        then = _of_a_kind(number_filters("y") if kind == "int" else word_filters("y"), rng)
    return Problem(
        source=source,
        filter=_of_a_kind(source.filters, rng),
        map=change,
        then=then,
        reduction=rng.choices(REDUCTIONS[kind], [r.weight for r in REDUCTIONS[kind]])[0],
    )


def draw_starter(rng: random.Random) -> Problem:
    """Return a problem of level starter."""
    maps = [m for m in (NO_MAP, *MAPS["int"]) if m.kind in STARTER_KINDS["map"]]
    reductions = [r for r in REDUCTIONS["int"] if r.kind in STARTER_KINDS["reduction"]]
    return Problem(
        source=STARTER,
        filter=_of_a_kind(STARTER.filters, rng),
        map=rng.choice(maps),
        then=None,
        reduction=rng.choice(reductions),
    )


def _of_a_kind(choices: Sequence[Any], rng: random.Random) -> Any:
    kind = rng.choice([*dict.fromkeys(choice.kind for choice in choices)])
    return rng.choice([choice for choice in choices if choice.kind == kind])


def make_split(split: str, seed: int, sizes: dict[str, dict[str, int]] = SIZES) -> list[Row]:
    """Return a split's rows, the levels mixed; the same seed, the same rows.

    Raises ValueError where there are not so many problems.
    """
    rng = random.Random(f"functions/{seed}/{split}" + "/starter" * (sizes is STARTER_SIZES))
    families = {TRANSFER: 1} if split == "transfer" else WEIGHTS
    rows: list[Row] = []
    for level, number in sizes[split].items():
        taken: set[str] = set()  # the parts of the level's problems
        fruitless = 0
        while len(taken) < number:
            fruitless += 1
            if fruitless > FRUITLESS:
                raise ValueError(f"{split}: only {len(taken)} problems of level {level} exist")
            problem = draw(level, families, rng)
            parts = json.dumps([problem.source.noun, problem.parts])
            held_out = split == "transfer" or is_held_out(problem) == (split == "eval")
            if not held_out or parts in taken:
                continue
            row = make_row(problem, level, rng)
            if row is not None:
                taken.add(parts)
                rows.append(row)
                fruitless = 0
    rng.shuffle(rows)
    return rows


def written(rows: Sequence[Row]) -> str:
    """Return the content of a split's file."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the shipped files")
    options = parser.parse_args(arguments)
    if options.seed and options.out is None:
        parser.error("--seed: the shipped files have seed 0; write others with --out")
    for files, sizes in ((FUNCTIONS, SIZES), (FUNCTIONS_STARTER, STARTER_SIZES)):
        for split, path in files.items():
            path = path if options.out is None else options.out / path.parent.name / path.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written(make_split(split, options.seed, sizes)), encoding="utf-8")
            print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
