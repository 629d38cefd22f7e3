"""A CoopMini problem: what it asks, and the code of every way to share it between agents.

Conventions, by what the helper does with the data:

    test        tells of one element whether it is kept
    transform   turns one element into its result
    then        turns one result of a long problem into the next
    filter      gives the collection of the elements that are kept
    map         gives the list of the results of a collection
    filter_map  both: the list of the results of those that are kept
    reduce      turns the list of results into the answer

A team of several helpers shares a problem by conventions that stand together in ``TOGETHER``.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations

from tools.coopmini.operations import (
    DICTIONARIES,
    DOMAINS,
    INTEGERS,
    PAIRS,
    REDUCTIONS,
    STRINGS,
    THENS,
    Domain,
    Groups,
    Operation,
)

CONVENTIONS = {  # stages of a problem → the conventions that leave main something to do
    "filter_map_reduce": ("filter", "test", "transform", "filter_map", "reduce"),
    "filter_map": ("filter", "test", "transform", "map"),
    "filter_reduce": ("filter", "test", "reduce"),
    "map_reduce": ("map", "transform", "reduce"),
    "filter_map_then_reduce": ("filter", "test", "transform", "then", "filter_map", "reduce"),
    "filter_map_then": ("filter", "test", "transform", "then", "filter_map"),
    "map_then_reduce": ("map", "transform", "then", "reduce"),
}
TOGETHER = (  # conventions that one main can use side by side
    {"test", "transform", "then", "reduce"},
    {"filter", "transform", "then", "reduce"},
    {"filter_map", "then", "reduce"},
    {"map", "then", "reduce"},
    {"filter", "map"},
    {"test", "map"},
)

_DOMAIN_WEIGHTS = {INTEGERS: 4, STRINGS: 2, PAIRS: 2, DICTIONARIES: 2}
SHORT = {"filter_map_reduce": 6, "filter_map": 3, "filter_reduce": 3, "map_reduce": 2}
LONG = {"filter_map_then_reduce": 6, "filter_map_then": 3, "map_then_reduce": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One combination of operations; two problems with equal ``key`` are the same problem."""

    domain: Domain
    filter: Operation | None
    map: Operation | None
    reduce: Operation | None
    then: Operation | None = None  # the second map of a long one

    @property
    def stages(self) -> str:
        names = ("filter", "map", "then", "reduce")
        return "_".join(name for name in names if getattr(self, name))

    @property
    def key(self) -> str:
        steps = (self.filter, self.map, self.reduce)
        codes = [step.code if step else "-" for step in steps]
        return " | ".join([self.domain.name, *codes, *([self.then.code] if self.then else [])])

    @property
    def conventions(self) -> tuple[str, ...]:
        return CONVENTIONS[self.stages]

    @property
    def shares(self) -> list[tuple[str, ...]]:
        """The conventions that a main can rely on at once; without a second map, one at a time."""
        return [
            several
            for count in range(1, 1 + (len(self.conventions) if self.then else 1))
            for several in combinations(self.conventions, count)
            if stand_together(several)
        ]

    @property
    def description(self) -> str:
        what = self.filter.phrase if self.filter else self.domain.noun
        if self.map:
            what += f", each {self.map.phrase}"
        if self.then:
            what += f", then each {self.then.phrase}"
        return (self.reduce.phrase if self.reduce else "List {}").format(what) + "."


def stand_together(conventions: Collection[str]) -> bool:
    return any(set(conventions) <= together for together in TOGETHER)


def draw(rng: random.Random, groups: Groups, kind: str | None = None) -> Operation:
    """Draw a random group, then one of its constants; ``kind`` narrows by type."""
    fitting = [group for group in groups if kind is None or group[0].gives == kind]
    return rng.choice(rng.choice(fitting))


def draw_problem(rng: random.Random, weights: Mapping[str, int] = SHORT) -> Problem:
    """Draw a problem, its stages by ``weights``.

    Not every problem can be tested so that only agreement passes.
    """
    domain = rng.choices(DOMAINS, [_DOMAIN_WEIGHTS[d] for d in DOMAINS])[0]
    open_to = [s for s in weights if domain.element_type or "map" in s]
    stages = rng.choices(open_to, [weights[s] for s in open_to])[0]
    mapped = draw(rng, domain.maps) if "map" in stages else None
    kind = mapped.gives if mapped else domain.element_type
    return Problem(
        domain=domain,
        filter=draw(rng, domain.filters) if "filter" in stages else None,
        map=mapped,
        reduce=draw(rng, REDUCTIONS, kind) if "reduce" in stages else None,
        then=draw(rng, THENS, kind) if "then" in stages else None,
    )


def helper_source(problem: Problem, convention: str, name: str = "aux") -> str:
    """Return the helper that follows ``convention`` (any of those listed in the module)."""
    domain = problem.domain
    loop = f"for {domain.element} in {domain.items.format(domain.param)}"
    condition = problem.filter.code if problem.filter else "True"
    value = problem.map.code if problem.map else domain.element
    parameters, result = {
        "test": (domain.element, condition),
        "transform": (domain.element, value),
        "then": ("y", problem.then.code if problem.then else "y"),
        "filter": (domain.param, domain.filtered.format(source=domain.param, condition=condition)),
        "map": (domain.param, f"[{value} {loop}]"),
        "filter_map": (domain.param, f"[{value} {loop} if {condition}]"),
        "reduce": ("ys", problem.reduce.code if problem.reduce else "ys"),
    }[convention]
    return f"def {name}({parameters}):\n    return {result}\n"


def main_source(problem: Problem, entry_point: str, helpers: Mapping[str, str]) -> str:
    """Return the entry point; ``helpers`` maps the conventions that it relies on to helpers.

    With no helpers it solves the problem alone.
    """
    domain = problem.domain
    lines, answer = [f"ys = {_results(problem, helpers)}"], "ys"
    if "map" in helpers and problem.filter:
        answer = f"{helpers['map']}(ys)"
    if problem.then:
        value = f"{helpers['then']}(y)" if "then" in helpers else problem.then.code
        answer = f"[{value} for y in ys]"
    if problem.reduce:
        if answer != "ys":
            lines.append(f"ys = {answer}")
        answer = f"{helpers['reduce']}(ys)" if "reduce" in helpers else problem.reduce.code
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {entry_point}({domain.param}):\n{body}    return {answer}\n"


def _results(problem: Problem, helpers: Mapping[str, str]) -> str:
    """Return the expression for the elements kept and transformed, before the reduction."""
    domain = problem.domain
    if "filter_map" in helpers:
        return f"{helpers['filter_map']}({domain.param})"
    source, condition = domain.param, problem.filter.code if problem.filter else ""
    if "filter" in helpers:
        source, condition = f"{helpers['filter']}({domain.param})", ""
    elif "test" in helpers:
        condition = f"{helpers['test']}({domain.element})"
    if "map" in helpers and not problem.filter:
        return f"{helpers['map']}({source})"
    if "map" in helpers or not problem.map:  # main maps later, or not at all
        return domain.filtered.format(source=source, condition=condition) if condition else source
    value = problem.map.code
    if "transform" in helpers:
        value = f"{helpers['transform']}({domain.element})"
    loop = f"for {domain.element} in {domain.items.format(source)}"
    return f"[{value} {loop} if {condition}]" if condition else f"[{value} {loop}]"
