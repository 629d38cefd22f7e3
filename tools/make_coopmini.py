"""Makes CoopMini problems.

    python tools/make_coopmini.py [--long] --seed 7 --num 100 --out FILE

Rows are in HumanEval's format (task_id, prompt, test, entry_point, canonical_solution) with
``family`` (kind of input), ``stages``, ``conventions`` (the ways to share the problem) and
``operations`` (what identifies it). Every assert of a problem fails for every pair of agents that
follow different conventions without a mistake, so that only agreement is rewarded. ``--long``
problems have three or four stages, a second map among them, and something to do for as many
helpers: there, every assert fails for a team of any size in which a helper that main calls follows
another convention than main relies on it for.
``--shipped`` writes the two shipped splits again, byte for byte.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.builtin import COOPMINI, COOPMINI_LONG
from tools.coopmini.problems import (
    LONG,
    SHORT,
    Problem,
    draw_problem,
    helper_source,
    main_source,
)
from tools.making import Maker

# fmt: off
ENTRY_POINTS = (
    "answer", "assess", "build", "collect", "compute", "derive", "digest", "evaluate",
    "figure", "gather", "handle", "inspect", "measure", "obtain", "process", "produce",
    "reckon", "report", "resolve", "review", "solve", "study", "survey", "treat",
)
# fmt: on
SHIPPED = {"train": (0, 384), "eval": (1, 64)}  # split → seed, problems
SHIPPED_LONG = {"train": (0, 256), "eval": (1, 64)}

_NUM_TESTS, _NUM_EXAMPLES = 6, 2
_DRAWS_PER_INPUT = 60
_FRUITLESS_DRAWS = 20_000  # no new problem in so many draws: there are none left


def compiled(source: str, name: str) -> Callable[[Any], Any]:
    """Return the function ``name`` of source that this package wrote itself."""
    return _within(source, {}, name)


def _within(source: str | CodeType, scope: dict[str, Any], name: str) -> Callable[[Any], Any]:
    exec(source, scope)  # rendered from our own templates, never a model's text
    return scope[name]


def mismatches(problem: Problem) -> Iterator[Callable[[Any], Any]]:
    """Yield the problem solved by teams of correct agents with mismatched conventions.

    Some or all helpers of such a team follow other conventions than main relies on.
    """
    helpers = {c: compiled(helper_source(problem, c), "aux") for c in problem.conventions}
    for expected in problem.shares:
        names = [f"aux{i}" for i in range(len(expected))]
        main = main_source(problem, "f", dict(zip(expected, names, strict=True)))
        code = compile(main, "main", "exec")
        for followed in product(problem.conventions, repeat=len(expected)):
            if followed != expected:
                team = zip(names, (helpers[c] for c in followed), strict=True)
                yield _within(code, dict(team), "f")


def find_cases(
    problem: Problem,
    rng: random.Random,
    sizes: Collection[int],
    wrong: Collection[Callable[[Any], Any]] = (),
) -> list[tuple[Any, Any]] | None:
    """Return (input, answer) for each size, such that nothing in ``wrong`` returns the answer.

    Inputs differ and answers are not empty, zero or None. None where such inputs are not found.
    """
    solve = compiled(main_source(problem, "f", {}), "f")
    cases: list[tuple[Any, Any]] = []
    for size in sizes:
        for _ in range(_DRAWS_PER_INPUT):
            value = problem.domain.sample(rng, size)
            answer = _outcome(solve, value)
            fresh = all(value != other for other, _ in cases)
            if fresh and answer and all(_outcome(f, value) != answer for f in wrong):
                cases.append((value, answer))
                break
        else:
            return None
    return cases


def _outcome(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a program's answer, or None if it fails, as mismatched programs do."""
    try:
        return function(value)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError):
        return None


def prompt_text(problem: Problem, entry_point: str, examples: Collection[tuple[Any, Any]]) -> str:
    """Return the entry point's stub: signature, description and doctest-like examples."""
    lines = [f"def {entry_point}({problem.domain.param}):", f'    """{problem.description}']
    for value, answer in examples:
        lines += [f"    >>> {entry_point}({value!r})", f"    {answer!r}"]
    return "\n".join([*lines, '    """', ""])


def check_text(cases: Collection[tuple[Any, Any]]) -> str:
    """Return the ``check`` function: one assert for each (input, answer)."""
    tests = [f"    assert candidate({value!r}) == {answer!r}" for value, answer in cases]
    return "\n".join(["def check(candidate):", *tests, ""])


def make_row(problem: Problem, rng: random.Random) -> dict[str, Any] | None:
    """Return a row without its task_id, or None if disagreement could pass on the problem."""
    examples = find_cases(problem, rng, [2] * _NUM_EXAMPLES)
    sizes = [rng.randint(4, 7) for _ in range(_NUM_TESTS)]
    if examples is None:
        return None
    cases = find_cases(problem, rng, sizes, list(mismatches(problem)))
    if not cases:
        return None
    entry_point = rng.choice(ENTRY_POINTS)
    return {
        "prompt": prompt_text(problem, entry_point, examples),
        "test": check_text(cases),
        "entry_point": entry_point,
        "canonical_solution": main_source(problem, entry_point, {}).split("\n", 1)[1],
        "family": problem.domain.name,
        "stages": problem.stages,
        "conventions": list(problem.conventions),
        "operations": problem.key,
    }


def make_rows(
    seed: int,
    num: int,
    exclude: Collection[str] = (),
    name: str | None = None,
    *,
    weights: Mapping[str, int] = SHORT,
    family: str = "CoopMini",
) -> list[dict[str, Any]]:
    """Return ``num`` different problems, none in ``exclude``; the same seed gives the same rows.

    ``name`` stands in their task_id (None: the seed), after ``family``; ``weights``: their stages,
    and how often. Raises ValueError where there are not that many.
    """
    rng, taken = random.Random(f"{family.lower()}/{seed}"), set(exclude)
    rows: list[dict[str, Any]] = []
    fruitless = 0
    while len(rows) < num:
        problem = draw_problem(rng, weights)
        row = None if problem.key in taken else make_row(problem, rng)
        taken.add(problem.key)
        fruitless = 0 if row else fruitless + 1
        if row:
            rows.append(
                {"task_id": f"{family}/{seed if name is None else name}/{len(rows)}", **row}
            )
        if fruitless == _FRUITLESS_DRAWS:
            raise ValueError(f"--num {num}: only {len(rows)} such problems exist; ask for fewer")
    return rows


MAKER = Maker(
    what="CoopMini problems", rows=make_rows, column="operations", seeds=SHIPPED, paths=COOPMINI
)
LONG_MAKER = Maker(
    what="long CoopMini problems",
    rows=partial(make_rows, weights=LONG, family="CoopMiniLong"),
    column="operations",
    seeds=SHIPPED_LONG,
    paths=COOPMINI_LONG,
)

if __name__ == "__main__":
    MAKER.main(long=LONG_MAKER)
