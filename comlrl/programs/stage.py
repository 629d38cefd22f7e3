"""Plays episodes side by side, and answers their waiting calls in waves.

A wave starts when no episode can go on by itself: nothing in the event loop is ready, no thread
runs, and every episode waits for a completion. Where an episode waits for something else (a timer,
a socket, another episode), the wave waits for it too, but not longer than ``PATIENCE``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from comlrl.config.plugins.targets import TargetError, described
from comlrl.errors import UserError
from comlrl.programs.agents import Agents
from comlrl.programs.endpoint import Endpoint
from comlrl.programs.event_loop import WaveLoop
from comlrl.programs.program import EpisodeError, UnknownAgent
from comlrl.programs.running import Board, Running, Setting, WaitingCall
from comlrl.types import Call, Episode, Request, Task

PATIENCE = 1.0  # seconds that a wave waits for other episodes, and the end for what it cancels


class Stage:
    """The episodes of one rollout, on an event loop of their own."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.loop = WaveLoop(self._when_idle, self._fail_late)
        self.endpoint = Endpoint(self.loop)  # listens where an episode asks for its address
        self.board = Board(setting, self.loop, self._fail, self._stop, self.endpoint.open)
        self._episodes: dict[Running, Episode] = {}
        self._tasks: dict[Running, asyncio.Task] = {}  # of those that have not ended
        self._idle_since: float | None = None  # with something to be answered
        self._next_end = math.inf  # no episode's time is over before

    def play(self, tasks: Sequence[Task], count: int) -> list[list[Episode]]:
        """``count`` episodes of each task. Raises TargetError for the first that fails."""
        running = [
            [Running(self.board, t, i, g) for g in range(count)] for i, t in enumerate(tasks)
        ]
        try:
            self.loop.run_until_complete(self._play([one for own in running for one in own]))
        finally:
            self._close()
        return [[self._episodes[one] for one in own] for own in running]

    async def _play(self, running: Sequence[Running]) -> None:
        self._all_ended = self.loop.create_future()
        for one in running:
            self._tasks[one] = task = self.loop.create_task(self._run(one))
            task.add_done_callback(_retrieve)
        self._next_end = min((one.deadline for one in running), default=math.inf)
        if running:
            await self._all_ended

    async def _run(self, running: Running) -> None:
        """One episode, and what becomes of it."""
        program = self.setting.program
        try:
            self._end(running, await program.play(running.task, Agents(running)))
        except asyncio.CancelledError:
            self._fail(running, "it was cancelled")
            raise
        except (Exception, SystemExit) as raised:
            error = _only(raised)
            if isinstance(error, UserError):
                self._stop(error)
                return
            own = isinstance(error, EpisodeError | UnknownAgent)
            text = str(error) if own else f"raised {described(error, program.target.sources)}"
            self._fail(running, text)

    def _end(self, running: Running, given: Any, error: str | None = None) -> None:
        """Take an episode as it is; what it still waits for is withdrawn."""
        if running.ended:
            return
        episode = running.episode(given, error)
        running.ended = True
        for call in self.board.calls:
            if call.running is running:
                call.answer.cancel()
        for score in self.board.scores:
            if score.running is running:
                score.answer.cancel()
        self._episodes[running] = episode
        del self._tasks[running]
        if not self._tasks and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _fail(self, running: Running, why: str) -> None:
        """An episode that cannot be played to its end: the run's end, or a score of 0."""
        if running.ended:
            return
        if self.setting.program.on_error == "stop":
            self._stop(TargetError(f"{running}: {why}"))
            return
        task = self._tasks[running]
        self._end(running, 0.0, why)
        task.cancel()

    def _stop(self, error: Exception) -> None:
        self.board.closed = True
        if not self._all_ended.done():
            self._all_ended.set_exception(error)

    def _when_idle(self, wait: float | None) -> float | None:
        """What can be done where no callback is ready; how long to wait for what else may come.

        ``wait``: seconds until the next timer; None: there is none.
        """
        if self._fail_late():
            return 0
        self.board.calls = [call for call in self.board.calls if not call.answer.done()]
        self.board.scores = [score for score in self.board.scores if not score.answer.done()]
        outside = wait is not None or self.loop.listens  # something may come by itself
        now, patience = time.monotonic(), self._patience(outside)
        if self.board.calls or self.board.scores:
            self._idle_since = self._idle_since or now
            if now >= self._idle_since + patience:
                return self._in_wave(self._score if self.board.scores else self._sample)
        elif not outside and not self.loop.in_threads and self._tasks:
            for one in list(self._tasks):
                self._fail(one, "it waits for something that will never come")
            return 0
        busy = self._tasks.keys() - self._waiting
        ends = [one.deadline - now for one in busy] + ([] if wait is None else [wait])
        if self._idle_since is not None:
            ends.append(self._idle_since + patience - now)
        return max(0.0, min(ends)) if ends else None

    @property
    def _waiting(self) -> set[Running]:
        """Episodes with something to be answered."""
        calls = {call.running for call in self.board.calls}
        return calls | {score.running for score in self.board.scores}

    def _patience(self, outside: bool) -> float:
        """Seconds that a wave waits for what may still come into it."""
        if not self._tasks.keys() - self._waiting:  # a thread, too, waits for its episode's call
            return 0.0
        if self.loop.in_threads:
            return self.setting.program.timeout
        return PATIENCE if outside else 0.0

    def _fail_late(self) -> bool:
        """End the episodes whose time is over; whether there was one."""
        now = time.monotonic()
        if now < self._next_end:
            return False
        waiting = self._waiting
        late = [one for one in self._tasks if one.deadline <= now and one not in waiting]
        for one in late:
            self._fail(
                one, f"it took more than {self.setting.program.timeout:g} s (program.timeout)"
            )
        self._next_end = min((one.deadline for one in self._tasks), default=math.inf)
        return bool(late)

    def _in_wave(self, answer: Callable[[], None]) -> float:
        """Time in which calls are answered is not the episodes' own."""
        started, self._idle_since = time.monotonic(), None
        answer()
        took = time.monotonic() - started
        for one in self._tasks:
            one.deadline += took
        return 0

    def _score(self) -> None:
        """All waiting joint actions, in one call of the reward."""
        waiting, self.board.scores = sorted(self.board.scores, key=lambda s: s.running.place), []
        scores = self.setting.reward.score([one.action for one in waiting])
        for one, score in zip(waiting, scores, strict=True):
            one.answer.set_result(score)

    def _sample(self) -> None:
        """All waiting calls, in one call of the sampler; like prompts are one request."""
        waiting, self.board.calls = (
            sorted(self.board.calls, key=lambda c: (c.running.place, c.slot)),
            [],
        )
        groups_N: list[dict[tuple[int, tuple[int, ...]], list[WaitingCall]]] = [
            {} for _ in self.setting.program.names_N
        ]
        for call in waiting:
            like = (call.running.place[0], call.ids)
            groups_N[call.agent].setdefault(like, []).append(call)
        requests_N = [
            [Request(ids, tuple(call.key for call in own)) for (_, ids), own in groups.items()]
            for groups in groups_N
        ]
        sampled_N = self.setting.sampler.sample(requests_N, self.setting.sampling)
        for groups, sampled in zip(groups_N, sampled_N, strict=True):
            for own, completions in zip(groups.values(), sampled, strict=True):
                for call, completion in zip(own, completions, strict=True):
                    made = Call(call.agent, call.number, call.prompt, call.ids, completion)
                    call.running.calls[call.slot] = made
                    call.answer.set_result(completion)

    def _close(self) -> None:
        """End what episodes have left running. Nobody is asked for it any more."""
        self.board.closed = True
        self.endpoint.close()
        self._tasks.clear()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:  # what catches its cancellation is left alone after that
            self.loop.run_until_complete(asyncio.wait(left, timeout=PATIENCE))
        self.loop.close()


def _only(error: BaseException) -> BaseException:
    """Of a group of one error, as an asyncio.TaskGroup raises it, that error."""
    inner: Sequence[BaseException] = getattr(error, "exceptions", ())
    return _only(inner[0]) if len(inner) == 1 else error


def _retrieve(task: asyncio.Task) -> None:
    """What an episode's task raises was reported by ``_run``."""
    if not task.cancelled():
        task.exception()
