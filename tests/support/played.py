"""Programs played on what only writes down what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from comlrl.config.plugins.targets import Target
from comlrl.programs.program import Program
from comlrl.programs.rollout import ProgramRollout
from comlrl.types import Completion, EpisodeGroup, Request, Reward, Row, Score, Shape
from tests.support.fakes import PROMPTS, SAMPLING, SEED, FakeSampler, task

TASKS = [task("A"), task("B")]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]


class PlainReward(Reward):
    """The texts' letters; keeps how many joint actions came together."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, actions):
        self.calls.append(len(actions))
        return [Score(float(sum(map(len, action.completions_N)))) for action in actions]

    def close(self) -> None:
        return


class Keeping(FakeSampler):
    """Keeps every request, too."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.requests: list[list[list[Request]]] = []

    def sample(self, requests_N, sampling):
        self.requests.append([list(own) for own in requests_N])
        return super().sample(requests_N, sampling)


class Writing(Keeping):
    """Writes these texts, one after the other."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = list(texts)

    def completion(self, key, sampling):
        text = self.texts.pop(0)
        return Completion(text, tuple(text.encode()), True, logprob_L=(-0.5,) * len(text.encode()))


class Serving(Keeping):
    """A server, which answers each request when ``before`` lets it."""

    def __init__(
        self, before: Callable[[Request], Awaitable[Any]] = lambda request: asyncio.sleep(0), **keys
    ) -> None:
        super().__init__(**keys)
        self.before = before
        self.asked: list[tuple[int, Request]] = []
        self.weighed: list[list[list[tuple[tuple[int, ...], int]]]] = []

    def present(self):
        return self

    async def sample_one(self, agent, request, sampling):
        self.asked.append((agent, request))
        await self.before(request)
        return tuple(self.completion(key, sampling) for key in request.keys_G)

    def weighted(self, requests_N, groups_N, sampling):
        self.weighed.append(
            [[(r.prompt_ids, len(r.keys_G)) for r in requests] for requests in requests_N]
        )
        return [[tuple(replace(c, importance=0.5) for c in g) for g in own] for own in groups_N]


def program(play: Callable, names: tuple[str, ...] = ("coder", "tester"), **limits: Any) -> Program:
    return replace(
        Program(target=Target("program.target", "mine:play", play, ()), names_N=names), **limits
    )


def rollout(
    play: Callable,
    *,
    sampler: FakeSampler | None = None,
    names: tuple[str, ...] = ("coder", "tester"),
    **limits: Any,
) -> ProgramRollout:
    made = program(play, names, **limits)
    return ProgramRollout(made, sampler or Keeping(), PlainReward(), PROMPTS, seed=SEED)


def played(play: Callable, count: int = 2, tasks=TASKS, **keys: Any) -> list[EpisodeGroup]:
    return rollout(play, **keys).grow(tasks, Shape(2, 1, count), SAMPLING, ("train", 1))


def playing(trainer: Any, play: Callable, names: tuple[str, ...] = ("aux", "main")) -> Any:
    """The same trainer, whose rollouts are episodes."""
    trees = trainer.rollout
    program = Program(target=Target("program.target", "mine:play", play, ()), names_N=names)
    trainer.rollout = ProgramRollout(
        program, trees.sampler, trees.reward, PROMPTS, seed=trees.seed, process=trees.process
    )
    return trainer


async def simultaneous(task, agents):
    """A turn in which no agent reads another."""
    texts = [await agents[name](agents.prompts[name]) for name in agents]
    return await agents.score(texts)


async def conversation(task, agents):
    """Prompts of aux that begin as the one before; rewards in the middle."""
    messages = [{"role": "user", "content": agents.prompts["aux"]}]
    for turn in range(2):
        text = await agents["aux"](messages)
        other = await agents["main"](f"{turn} {text}")
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"They wrote {len(other)}."},
        ]
        await agents.reward("aux", len(text) / 10)
    return len(other) / 5


def one_by_one(decisions, numbers, weight_T):
    """``Decisions.packed`` where no decisions share a row."""
    return [
        Row.from_completions(decisions[n].prompt_ids, [decisions[n].completion], weight_T[:1], [n])
        for n in numbers
    ]
