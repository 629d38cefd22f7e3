"""Noisy demonstrations for pretraining: what programmers of very mixed habits might answer.

Each draws its convention on its own, so two of them agree only by luck, and many slip: a wrong
operation, no return, a stray fence, an answer that breaks off or does not end. What is left to
reinforcement learning is to agree and to drop the slips; how to write each convention is learned
here. The shares below set the reward at which training starts.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from comlrl.builtin.make_coopmini import ENTRY_POINTS, find_cases, prompt_text
from comlrl.builtin.operations import REDUCTIONS
from comlrl.builtin.problems import (
    Problem,
    draw,
    draw_problem,
    helper_source,
    main_source,
)
from comlrl.prompts import first_prompts, helper_names, plain_text
from comlrl.types import Message, Task

TEAM_SIZES = {1: 0.18, 2: 0.64, 3: 0.11, 4: 0.07}
CONVENTION_WEIGHTS = (8, 4, 3, 2, 2)  # in the order of Problem.conventions
WRONG_OPERATION = 0.12
ONE_RETURN = 0.15  # main as a thin wrapper
SOLO = 0.01  # main does without its helpers
IGNORES = 0.005  # main calls a helper and solves the problem without its result
SLIPS = {  # what goes wrong with the text, and how often
    "": 0.77,
    "no return": 0.05,
    "misnamed": 0.03,
    "broken": 0.04,
    "cut": 0.03,
    "prose only": 0.01,
    "fenced": 0.03,
    "prose first": 0.02,
    "endless": 0.02,
}
_FAVOURITES = {"aux2": "transform", "aux3": "reduce"}  # where a team has several helpers
_TOGETHER = (  # conventions that one main can use side by side
    {"test", "transform", "reduce"},
    {"filter", "transform", "reduce"},
    {"filter_map", "reduce"},
    {"map", "reduce"},
    {"filter", "map"},
    {"test", "map"},
)
_ENDLESS_REPEATS = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion; ``ends`` is False for one that goes on until it is cut off."""

    text: str
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One prompt and several independent answers to it."""

    prompt: str
    answers: tuple[Answer, ...]


def make_task(problem: Problem, rng: random.Random) -> Task | None:
    """The problem as an agent reads it, without tests; None where no fitting example exists."""
    examples = find_cases(problem, rng, [2, 2])
    if examples is None:
        return None
    name = rng.choice(ENTRY_POINTS)
    return Task("pretraining", prompt_text(problem, name, examples), "", name)


def demonstrations(seed: int, exclude: Collection[str], answers: int) -> Iterator[Demonstration]:
    """Endless demonstrations on problems whose ``key`` is not in ``exclude``."""
    rng = random.Random(f"demonstrations/{seed}")
    while True:
        problem = draw_problem(rng)
        task = None if problem.key in exclude else make_task(problem, rng)
        if task is None:
            continue
        team = rng.choices(list(TEAM_SIZES), list(TEAM_SIZES.values()))[0]
        agent = draw_agent(rng, team)
        prompt = plain_text((Message("user", first_prompts(task, team)[agent]),))
        yield Demonstration(
            prompt,
            tuple(draw_answer(rng, problem, task.entry_point, team, agent) for _ in range(answers)),
        )


def draw_agent(rng: random.Random, team: int) -> int:
    """Index of an agent: main as often as all helpers together."""
    return team - 1 if team == 1 or rng.random() < 0.5 else rng.randrange(team - 1)


def draw_answer(
    rng: random.Random, problem: Problem, entry_point: str, team: int, agent: int
) -> Answer:
    """What one agent (helpers first, main last) might write."""
    if rng.random() < WRONG_OPERATION:
        problem = with_wrong_operation(rng, problem)
    names = helper_names(team)
    if agent < len(names):
        convention = draw_convention(rng, problem, names[agent])
        return slip(rng, helper_source(problem, convention, names[agent]), names[agent])
    return slip(rng, draw_main(rng, problem, entry_point, names), entry_point)


def draw_convention(rng: random.Random, problem: Problem, name: str = "aux") -> str:
    """A convention for a helper: the later helpers of a team lean towards the later stages."""
    options = problem.conventions
    weights = list(CONVENTION_WEIGHTS[: len(options)])
    favourite = _FAVOURITES.get(name)
    if favourite in options:
        weights[options.index(favourite)] = 3 * sum(weights)
    return rng.choices(options, weights)[0]


def draw_main(
    rng: random.Random, problem: Problem, entry_point: str, names: Collection[str]
) -> str:
    """The entry point, built on a guess of what each helper does."""
    draw = rng.random()
    if names and draw < IGNORES:
        head, body = main_source(problem, entry_point, {}).split("\n", 1)
        return f"{head}\n    aux({problem.domain.param})\n{body}"
    if not names or draw < IGNORES + SOLO:
        return main_source(problem, entry_point, {})
    helpers: dict[str, str] = {}
    for name in names:
        convention = draw_convention(rng, problem, name)
        if convention not in helpers and any({*helpers, convention} <= t for t in _TOGETHER):
            helpers[convention] = name
    source = main_source(problem, entry_point, helpers)
    return one_return(source) if rng.random() < ONE_RETURN else source


def one_return(source: str) -> str:
    """The same function with its one assignment written into the return, where that is possible."""
    lines = source.splitlines()
    if len(lines) != 3 or lines[2].replace("keys", "").count("ys") != 1:
        return source
    value = lines[1].removeprefix("    ys = ")
    return f"{lines[0]}\n{lines[2].replace('ys', value)}\n"


def with_wrong_operation(rng: random.Random, problem: Problem) -> Problem:
    """The problem with one of its operations replaced by another of the same type."""
    stage = rng.choice(problem.stages.split("_"))
    groups = {"filter": problem.domain.filters, "map": problem.domain.maps, "reduce": REDUCTIONS}
    kind = getattr(problem, stage).gives if stage != "filter" else None
    return replace(problem, **{stage: draw(rng, groups[stage], kind)})


def slip(rng: random.Random, source: str, name: str) -> Answer:
    """The function as it might come out, most often unharmed."""
    source = source.rstrip("\n")
    kind = rng.choices(list(SLIPS), list(SLIPS.values()))[0]
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
        return Answer(
            source + rng.choice(["\n" + last, "\n" + source, " " + "("]) * _ENDLESS_REPEATS, False
        )
    return Answer(source)
