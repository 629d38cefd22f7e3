"""Answers calls in waves: one call of the sampler answers all pending calls.

A wave starts when no episode can continue by itself: nothing in the event loop is ready, no thread
runs, and every episode waits for a completion.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from comlrl.programs.running import PendingCall, PendingScore, RolloutSettings
from comlrl.types import Completion, Request, Score

T = TypeVar("T", PendingCall, PendingScore)


class Waves:
    """Answers calls with a sampler that does not support concurrent requests."""

    def __init__(self, settings: RolloutSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings, self.loop = settings, loop
        self._calls: list[tuple[PendingCall, asyncio.Future[Completion]]] = []
        self._scores: list[tuple[PendingScore, asyncio.Future[Score]]] = []
        self._idle_since: float | None = None  # while an answer is pending

    def ask(self, call: PendingCall) -> asyncio.Future[Completion]:
        self._calls.append((call, self.loop.create_future()))
        return self._calls[-1][1]

    def ask_score(self, score: PendingScore) -> asyncio.Future[Score]:
        self._scores.append((score, self.loop.create_future()))
        return self._scores[-1][1]

    def when_idle(self, patience: float) -> float | None:
        self._calls = [(call, answer) for call, answer in self._calls if not answer.done()]
        self._scores = [(score, answer) for score, answer in self._scores if not answer.done()]
        if not self._calls and not self._scores:
            return None
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now < self._idle_since + patience:
            return self._idle_since + patience - now
        self._idle_since = None
        if self._scores:
            self._score()
        else:
            self._sample()
        return 0

    def close(self) -> None:
        pass

    def _score(self) -> None:
        """Score all pending joint actions in one call of the reward."""
        waiting, self._scores = sorted(self._scores, key=lambda s: s[0].running.place), []
        scores = self.settings.reward.score([score.action for score, _ in waiting])
        for (_, answer), score in zip(waiting, scores, strict=True):
            answer.set_result(score)

    def _sample(self) -> None:
        """Sample all pending calls, with one call of the sampler per set of stops."""
        waiting, self._calls = sorted(self._calls, key=lambda c: c[0].place), []
        for stop in dict.fromkeys(call.stop for call, _ in waiting):
            self._sample_with(stop, [pair for pair in waiting if pair[0].stop == stop])

    def _sample_with(
        self, stop: tuple[str, ...], waiting: list[tuple[PendingCall, asyncio.Future[Completion]]]
    ) -> None:
        """Sample calls with these stops; equal prompts form one request."""
        groups_N: list[dict[tuple[int, tuple[int, ...]], list[int]]] = [
            {} for _ in self.settings.program.names_N
        ]
        for index, (call, _) in enumerate(waiting):
            like = (call.running.place[0], call.ids)
            groups_N[call.agent].setdefault(like, []).append(index)
        requests_N = [
            [
                Request(ids, tuple(waiting[index][0].key for index in indices))
                for (_, ids), indices in groups.items()
            ]
            for groups in groups_N
        ]
        sampled_N = self.settings.sampler.sample(
            requests_N, self.settings.sampling.with_stops(stop)
        )
        for groups, sampled in zip(groups_N, sampled_N, strict=True):
            for indices, completions in zip(groups.values(), sampled, strict=True):
                for index, completion in zip(indices, completions, strict=True):
                    call, answer = waiting[index]
                    call.record(completion)
                    answer.set_result(completion)
