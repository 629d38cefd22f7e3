"""Noisy demonstrations for pretraining: what programmers of very mixed habits might answer.

Each draws its convention on its own, so two of them agree only by luck, and many slip: a wrong
operation, no return, a stray fence, an answer that breaks off or does not end. What is left to
reinforcement learning is to agree and to drop the slips; how to write each convention is learned
here. The shares below set the reward at which training starts.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.prompt_templates import helper_names
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.types import Message, Task
from tools.coopmini.operations import REDUCTIONS, THENS
from tools.coopmini.problems import (
    LONG,
    SHORT,
    Problem,
    draw,
    draw_problem,
    helper_source,
    main_source,
    stand_together,
)
from tools.make_coopmini import ENTRY_POINTS, check_text, find_cases, prompt_text

PROMPTS = Prompts(CODE)
TEAM_SIZES = {1: 0.18, 2: 0.64, 3: 0.11, 4: 0.07}
LONG_TEAM_SIZES = {1: 0.24, 2: 0.19, 3: 0.19, 4: 0.19, 5: 0.19}  # for long problems
CONVENTION_WEIGHTS = (6, 4, 3, 3, 3)  # in the order of Problem.conventions
LONG_CONVENTION_WEIGHTS = (12, 4, 2, 2, 2, 2)
WRONG_OPERATION = 0.15
ONE_RETURN = 0.15  # main as a thin wrapper
SOLO = 0.01  # main does without its helpers
IGNORES = 0.005  # main calls a helper and solves the problem without its result
SLIPS = {  # what goes wrong with the text, and how often
    "": 0.64,
    "no return": 0.08,
    "misnamed": 0.06,
    "broken": 0.06,
    "cut": 0.06,
    "prose only": 0.03,
    "fenced": 0.03,
    "prose first": 0.02,
    "endless": 0.02,
}
CARELESS = {kind: 1.35 * often for kind, often in SLIPS.items() if kind}
CARELESS[""] = 1 - sum(CARELESS.values())
CAREFUL = {kind: 0.4 * often for kind, often in SLIPS.items() if kind}  # five agents slip often
CAREFUL[""] = 1 - sum(CAREFUL.values())
_FAVOURITES = {"aux2": "transform", "aux3": "reduce"}  # where a team has several helpers
_LONG_FAVOURITES = {"aux2": "transform", "aux3": "then", "aux4": "reduce"}
_ENDLESS_REPEATS = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion; ``ends`` is False for one that continues until it is cut off."""

    text: str
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One prompt and several independent answers to it."""

    prompt: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of an agent: a helper (``convention``) or main (``helpers``)."""

    problem: Problem  # as the agent understands it
    name: str  # of the function
    convention: str | None = None
    helpers: Mapping[str, str] = field(default_factory=dict)  # convention → helper that main calls
    style: Literal["", "one return", "ignores"] = ""

    def source(self) -> str:
        if self.convention:
            return helper_source(self.problem, self.convention, self.name)
        source = main_source(self.problem, self.name, self.helpers)
        if self.style == "ignores":
            head, body = source.split("\n", 1)
            return f"{head}\n    aux({self.problem.domain.param})\n{body}"
        return one_return(source) if self.style == "one return" else source


def demonstrations(
    seed: int,
    exclude: Collection[str],
    answers: int,
    slips: Mapping[str, float] = SLIPS,
    long: bool = False,
) -> Iterator[Demonstration]:
    """Yield endless demonstrations on (long) problems whose ``key`` is not in ``exclude``."""
    rng = random.Random(f"demonstrations/{seed}")
    while True:
        problem, task = draw_task(rng, exclude, weights=LONG if long else SHORT)
        team = draw_team(rng, LONG_TEAM_SIZES if long else TEAM_SIZES)
        agent = draw_agent(rng, team)
        name = CODE.parts(task, team)[agent]
        prompt = plain_text((Message("user", PROMPTS.first(task, team)[agent]),))
        entry_point = task.fields["entry_point"]
        plans = [draw_plan(rng, problem, entry_point, team, agent) for _ in range(answers)]
        yield Demonstration(
            prompt, tuple(slip(rng, plan.source(), name, slips=slips) for plan in plans)
        )


def draw_task(
    rng: random.Random,
    exclude: Collection[str],
    tests: int = 0,
    weights: Mapping[str, int] = SHORT,
) -> tuple[Problem, Task]:
    """Draw a problem whose ``key`` is not in ``exclude``, as agents read it."""
    while True:
        problem = draw_problem(rng, weights)
        sizes = [2, 2] + [5] * tests
        cases = None if problem.key in exclude else find_cases(problem, rng, sizes)
        if cases:
            name = rng.choice(ENTRY_POINTS)
            fields = {"prompt": prompt_text(problem, name, cases[:2]), "entry_point": name}
            fields["test"] = check_text(cases[2:])
            return problem, Task("pretraining", fields)


def draw_team(rng: random.Random, sizes: Mapping[int, float] = TEAM_SIZES) -> int:
    """Draw a number of agents."""
    return rng.choices(list(sizes), list(sizes.values()))[0]


def draw_agent(rng: random.Random, team: int) -> int:
    """Draw the index of an agent: main as often as all helpers together."""
    return team - 1 if team == 1 or rng.random() < 0.5 else rng.randrange(team - 1)


def draw_plan(
    rng: random.Random, problem: Problem, entry_point: str, team: int, agent: int
) -> Plan:
    """Draw what one agent (helpers first, main last) might plan to write."""
    if rng.random() < WRONG_OPERATION:
        problem = with_wrong_operation(rng, problem)
    names = helper_names(team)
    if agent < len(names):
        return Plan(
            problem=problem,
            name=names[agent],
            convention=draw_convention(rng, problem, names[agent]),
        )
    luck = rng.random()
    if names and luck < IGNORES:
        return Plan(problem=problem, name=entry_point, style="ignores")
    if names and luck < IGNORES + SOLO:
        return Plan(problem=problem, name=entry_point)
    guesses = [(name, draw_convention(rng, problem, name)) for name in names]
    style: Literal["", "one return"] = "one return" if names and rng.random() < ONE_RETURN else ""
    return Plan(problem=problem, name=entry_point, helpers=usable_together(guesses), style=style)


def draw_convention(rng: random.Random, problem: Problem, name: str = "aux") -> str:
    """Draw a helper's convention: a team's later helpers lean towards the later stages."""
    options, long = problem.conventions, problem.then is not None
    weights = list((LONG_CONVENTION_WEIGHTS if long else CONVENTION_WEIGHTS)[: len(options)])
    favourite = (_LONG_FAVOURITES if long else _FAVOURITES).get(name)
    if favourite in options:
        weights[options.index(favourite)] = 3 * sum(weights)
    return rng.choices(options, weights)[0]


def usable_together(helpers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return convention → name of the (name, convention) pairs that one main can use together."""
    chosen: dict[str, str] = {}
    for name, convention in helpers:
        if convention not in chosen and stand_together([*chosen, convention]):
            chosen[convention] = name
    return chosen


def with_wrong_operation(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with one of its operations replaced by another of the same type."""
    stage = rng.choice(problem.stages.split("_"))
    domain = problem.domain
    groups = {"filter": domain.filters, "map": domain.maps, "then": THENS, "reduce": REDUCTIONS}
    kind = getattr(problem, stage).gives if stage != "filter" else None
    changed: dict[str, Any] = {stage: draw(rng, groups[stage], kind)}
    return replace(problem, **changed)


def one_return(source: str) -> str:
    """Return the function with its only assignment inlined in the return, where possible."""
    lines = source.splitlines()
    if len(lines) != 3 or lines[2].replace("keys", "").count("ys") != 1:
        return source
    value = lines[1].removeprefix("    ys = ")
    return f"{lines[0]}\n{lines[2].replace('ys', value)}\n"


def slip(
    rng: random.Random,
    source: str,
    name: str,
    share: float = 1.0,
    slips: Mapping[str, float] = SLIPS,
) -> Answer:
    """Return the function as an agent might write it; ``share`` < 1 leaves more unharmed."""
    source = source.rstrip("\n")
    kind = rng.choices(list(slips), list(slips.values()))[0] if rng.random() < share else ""
    head, _, last = source.rpartition("\n")
    if kind == "no return":
        source = f"{head}\n{last.replace('return ', 'ys = ')}"
    elif kind == "misnamed":
        source = source.replace(f"def {name}(", f"def {rng.choice(['helper', 'function'])}(", 1)
    elif kind == "broken":
        place = rng.choice([i for i, c in enumerate(source) if c in ")]:"])
        source = source[:place] + source[place + 1 :]
    elif kind == "cut":
        words = source.split(" ")
        source = " ".join(words[: rng.randrange(1, len(words))])
    elif kind == "prose only":
        source = f"The function `{name}` is easy to write."
    elif kind == "fenced":
        source = f"```python\n{source}\n```"
    elif kind == "prose first":
        source = f"Here is the code:\n{source}"
    elif kind == "endless":
        repeated = rng.choice([f"\n{last}", f"\n{source}", " ("])
        return Answer(source + repeated * _ENDLESS_REPEATS, ends=False)
    return Answer(source)
