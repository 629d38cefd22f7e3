"""Sends each call to a server as soon as it is made; servers batch concurrent requests.

Scores are computed in a thread, so that they do not delay completions. Joint actions that arrive
meanwhile are scored next, in one call of the reward.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from comlrl.programs.running import PendingCall, PendingScore, RolloutSettings
from comlrl.rollout import daemon_threads
from comlrl.types import (
    AsyncSampler,
    Call,
    Completion,
    Episode,
    Request,
    Sampling,
    Score,
    ServedSampler,
)


class Served:
    """Answers calls with the servers of a sampler."""

    def __init__(
        self,
        settings: RolloutSettings,
        sampler: AsyncSampler,
        loop: asyncio.AbstractEventLoop,
        stop: Callable[[BaseException], None],
    ) -> None:
        """Initialize. ``stop`` ends the run on an error that belongs to no episode."""
        self.settings, self.sampler, self.loop, self.stop = settings, sampler, loop, stop
        self._scores: list[tuple[PendingScore, asyncio.Future[Score]]] = []
        self._scorer: asyncio.Task[None] | None = None
        self._scoring: concurrent.futures.Future[list[Score]] | None = None  # in a thread

    def ask(self, call: PendingCall) -> asyncio.Future[Completion]:
        return self.loop.create_task(self._sample(call))

    def ask_score(self, score: PendingScore) -> asyncio.Future[Score]:
        answer: asyncio.Future[Score] = self.loop.create_future()
        self._scores.append((score, answer))
        if self._scorer is None or self._scorer.done():
            self._scorer = self.loop.create_task(self._score())
        return answer

    def when_idle(self, patience: float) -> float | None:
        return None  # answers arrive as events

    def close(self) -> None:
        if self._scoring is not None:  # two threads must not use the reward
            concurrent.futures.wait([self._scoring])

    async def _sample(self, call: PendingCall) -> Completion:
        request = Request(call.ids, (call.key,), task_id=call.running.task.task_id)
        try:
            (completion,) = await self.sampler.sample_one(
                call.agent, request, self.settings.sampling.with_stops(call.stop)
            )
        except Exception as error:
            self.stop(error)
            return await self.loop.create_future()  # until it is cancelled
        call.record(completion)
        return completion

    async def _score(self) -> None:
        """Score pending joint actions until none is left."""
        while waiting := [(score, answer) for score, answer in self._scores if not answer.done()]:
            self._scores = []
            waiting.sort(key=lambda pair: pair[0].running.place)
            job = partial(self.settings.reward.score, [score.action for score, _ in waiting])
            self._scoring = daemon_threads.start(job)
            try:
                scores = await asyncio.wrap_future(self._scoring)
            except Exception as error:
                self.stop(error)
                return
            for (_, answer), score in zip(waiting, scores, strict=True):
                if not answer.done():
                    answer.set_result(score)
        self._scores = []


def weighted(
    sampler: ServedSampler,
    episodes_BG: Sequence[Sequence[Episode]],
    sampling: Sampling,
    agents: int,
) -> list[list[Episode]]:
    """Return the episodes with the sampler's importance weights added to their calls."""
    groups_N: list[dict[tuple[int, tuple[int, ...]], list[Call]]] = [{} for _ in range(agents)]
    for task, episodes in enumerate(episodes_BG):
        for call in (call for episode in episodes for call in episode.calls):
            groups_N[call.agent].setdefault((task, call.prompt_ids), []).append(call)
    weighted_N = sampler.weighted(
        [[Request(ids, ((),) * len(calls)) for (_, ids), calls in g.items()] for g in groups_N],
        [[tuple(call.completion for call in calls) for calls in g.values()] for g in groups_N],
        sampling,
    )
    weighted_calls = {
        id(call): replace(call, completion=completion)
        for groups, weighted in zip(groups_N, weighted_N, strict=True)
        for calls, completions in zip(groups.values(), weighted, strict=True)
        for call, completion in zip(calls, completions, strict=True)
    }
    return [
        [
            replace(episode, calls=tuple(weighted_calls[id(call)] for call in episode.calls))
            for episode in episodes
        ]
        for episodes in episodes_BG
    ]
