"""Programs played on what only writes down what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from comlrl.config.plugins.targets import Target
from comlrl.programs.program import Program
from comlrl.programs.rollout import ProgramRollout
from comlrl.types import EpisodeGroup, Request, Reward, Score, Shape
from tests.support.fakes import PROMPTS, SAMPLING, SEED, FakeSampler, task

TASKS = [task("A"), task("B")]


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


def program(play: Callable, names: tuple[str, ...] = ("coder", "tester"), **limits: Any) -> Program:
    return replace(Program(Target("program.target", "mine:play", play, ()), names), **limits)


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
