"""A sampler, a reward and a transition that only write down what they were asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from comlrl.rewards.code.domain import CODE
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.types import (
    Attempt,
    Completion,
    JointAction,
    Message,
    Request,
    Reward,
    Sampling,
    Score,
    Task,
)

SEED = 11
SAMPLING = Sampling(1.0, 8)
PROMPTS = Prompts(CODE)
Path = tuple[int, ...]  # the joint action taken at each turn before


def code_task(task_id: str, prompt: str, test: str, entry_point: str, **extra: Any) -> Task:
    """A task of the code domain, unchecked; ``extra``: further fields of its row."""
    return Task(task_id, {"prompt": prompt, "test": test, "entry_point": entry_point} | extra)


def task(name: str = "A") -> Task:
    return code_task(name, "def f(x):\n    '''Adds one.'''\n", "def check(candidate): ...", "f")


class FakeSampler:
    """Completions that say which they are: ``task|path|agent|generation``; a token a letter."""

    def __init__(self, max_length: int = 10_000) -> None:
        self.max_length = max_length
        self.calls: list[list[int]] = []  # requests of each agent, for each call
        self.keys: list[tuple] = []  # of the completions, in order

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return tuple(plain_text(prompt).encode())

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return len(prompt_ids) + sampling.max_new_tokens <= self.max_length

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        return [bytes([token]).decode() for token in token_ids]

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        self.calls.append([len(requests) for requests in requests_N])
        return [
            [tuple(self.completion(key, sampling) for key in r.keys_G) for r in requests]
            for requests in requests_N
        ]

    def completion(self, key: tuple, sampling: Sampling) -> Completion:
        self.keys.append(key)
        name, path, agent, g = key[-4:]
        assert key[0] == SEED
        text = f"{name}|{'.'.join(map(str, path))}|{agent}|{g}"
        if sampling.temperature == 0:
            text += "|greedy"
        return Completion(text, tuple(text.encode()), True)


def parts(text: str) -> tuple[str, Path, int, int]:
    """(task, path, agent, generation) of a fake completion."""
    name, path, agent, g, *_ = text.split("|")
    return name, tuple(int(k) for k in path.split(".") if k), int(agent), int(g)


class FakeReward(Reward):
    """``value(task, path, generations of the joint action)`` as the reward; counts."""

    def __init__(self, value: Callable[[str, Path, Path], float]) -> None:
        self.value = value
        self.calls = self.scored = 0

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        self.calls += 1
        self.scored += len(actions)
        return [Score(self.one(action)) for action in actions]

    def one(self, action: JointAction) -> float:
        parts_N = [parts(text) for text in action.completions_N]
        assert [agent for _, _, agent, _ in parts_N] == list(range(len(parts_N)))
        name, path, _, _ = parts_N[0]
        assert name == action.task.task_id
        chosen = tuple(g for *_, g in parts_N)
        # Siblings of one node, or each below what those before it wrote.
        below = [
            path if len(each[1]) == len(path) else (*path, *chosen[:i])
            for i, each in enumerate(parts_N)
        ]
        assert [each[:2] for each in parts_N] == [(name, own) for own in below]
        return self.value(name, path, chosen)

    def close(self) -> None:
        return


class FakeTransition:
    """Tells each agent which of its attempts it is about."""

    def __init__(self) -> None:
        self.calls: list[list[Attempt]] = []

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        self.calls.append(list(attempts))
        return [
            tuple(f"feedback on {text} at {attempt.turn}" for text in attempt.completions_N)
            for attempt in attempts
        ]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
