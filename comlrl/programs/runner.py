"""Plays episodes concurrently.

With a server, each call is sampled as soon as it is made. Any other sampler answers calls in waves.
If an episode waits for something other than an answer (a timer, a socket, another episode), the
next wave waits for that episode, but at most ``PATIENCE``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from comlrl.config.plugins.targets import TargetError, described
from comlrl.errors import UserError
from comlrl.programs.agents import Agents
from comlrl.programs.endpoint import Endpoint
from comlrl.programs.event_loop import WaveLoop
from comlrl.programs.program import EpisodeError, UnknownAgent
from comlrl.programs.running import Answers, RolloutContext, RolloutSettings, RunningEpisode
from comlrl.programs.served import Served
from comlrl.programs.waves import Waves
from comlrl.types import Episode, ServedSampler, Task

PATIENCE = 1.0  # seconds that a wave waits for other episodes, and closing for cancelled tasks


class EpisodeRunner:
    """Runs the episodes of one rollout on a separate event loop."""

    def __init__(self, settings: RolloutSettings) -> None:
        sampler, self.settings = settings.sampler, settings
        present = sampler.present() if isinstance(sampler, ServedSampler) else None
        self.loop = WaveLoop(self._when_idle, self._fail_late)
        self.loop.set_exception_handler(self._on_error)
        self.endpoint = Endpoint(self.loop)  # listens once an episode requests its address
        self.answers: Answers = Waves(settings, self.loop)
        if present is not None:
            self.answers = Served(settings, present, self.loop, self._stop)
        self.context = RolloutContext(
            settings=settings,
            loop=self.loop,
            fail=self._fail,
            stop=self._stop,
            address=self.endpoint.open,
            answers=self.answers,
        )
        self._episodes: dict[RunningEpisode, Episode] = {}
        self._tasks: dict[RunningEpisode, asyncio.Task] = {}  # unfinished episodes
        self._next_end = math.inf  # no episode times out before this time

    def play(self, tasks: Sequence[Task], keys: Sequence[tuple], count: int) -> list[list[Episode]]:
        """Play ``count`` episodes of each task, with the key at its index.

        With ``on_error: stop``, raises TargetError for the first episode that fails.
        """
        running = [
            [RunningEpisode(self.context, task, key, i, g) for g in range(count)]
            for i, (task, key) in enumerate(zip(tasks, keys, strict=True))
        ]
        try:
            self.loop.run_until_complete(
                self._play([episode for episodes in running for episode in episodes])
            )
        finally:
            self._close()
        return [[self._episodes[episode] for episode in episodes] for episodes in running]

    async def _play(self, running: Sequence[RunningEpisode]) -> None:
        self._all_ended = self.loop.create_future()
        for episode in running:
            self._tasks[episode] = task = self.loop.create_task(self._run(episode))
            task.add_done_callback(self._retrieve)
        self._next_end = min((episode.deadline for episode in running), default=math.inf)
        if running:
            await self._all_ended

    async def _run(self, running: RunningEpisode) -> None:
        """Play one episode and record its result."""
        program = self.settings.program
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
            is_plain = isinstance(error, EpisodeError | UnknownAgent)
            text = str(error) if is_plain else f"raised {described(error, program.target.sources)}"
            self._fail(running, text)

    def _end(self, running: RunningEpisode, result: Any, error: str | None = None) -> None:
        """Record an episode's result and withdraw its pending calls and scores."""
        if running.ended or self.context.closed:
            return
        episode = running.episode(result, error)
        running.ended = True
        for answer in running.waiting:
            answer.cancel()
        self._episodes[running] = episode
        del self._tasks[running]
        if not self._tasks and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _fail(self, running: RunningEpisode, why: str) -> None:
        """End an episode that cannot continue: stop the run, or score the episode 0."""
        if running.ended or self.context.closed:
            return
        if self.settings.program.on_error == "stop":
            self._stop(TargetError(f"{running}: {why}"))
            return
        task = self._tasks[running]
        self._end(running, 0.0, why)
        task.cancel()

    def _stop(self, error: BaseException) -> None:
        self.context.closed = True
        if not self._all_ended.done():
            self._all_ended.set_exception(error)

    def _retrieve(self, task: asyncio.Task) -> None:
        """Stop all episodes if this one was interrupted; ``_run`` has handled other errors."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Exception):
            self._stop(error)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception from a callback: an interrupt stops the run, others are logged."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            self._stop(error)
        else:
            loop.default_exception_handler(context)

    def _when_idle(self, wait: float | None) -> float | None:
        """Answer calls while no callback is ready; return how long to wait for further events.

        ``wait`` is the time until the next timer in seconds, or None without timers.
        """
        if self._fail_late():
            return 0
        outside = wait is not None or self.loop.listens  # a timer or socket may wake an episode
        busy = [episode for episode in self._tasks if not episode.waiting]
        began = time.monotonic()
        due = self.answers.when_idle(self._patience(busy, outside))
        if due == 0:
            took = time.monotonic() - began
            for episode in busy:  # nothing else runs while calls are answered in a wave
                episode.deadline += took
            return 0
        if len(busy) == len(self._tasks) > 0 and not outside and not self.loop.in_threads:
            for episode in busy:
                self._fail(episode, "it waits for something that will never come")
            return 0
        ends = [episode.deadline - began for episode in busy]
        ends += [seconds for seconds in (wait, due) if seconds is not None]
        return max(0.0, min(ends)) if ends else None

    def _patience(self, busy: Sequence[RunningEpisode], outside: bool) -> float:
        """Return how many seconds a wave waits for further calls to join it."""
        if not busy:  # threads, too, can only be waiting for their episodes' calls
            return 0.0
        if self.loop.in_threads:
            return self.settings.program.timeout
        return PATIENCE if outside else 0.0

    def _fail_late(self) -> bool:
        """Fail the episodes that have timed out; return whether there were any."""
        now = time.monotonic()
        if now < self._next_end:
            return False
        late = [
            episode for episode in self._tasks if episode.deadline <= now and not episode.waiting
        ]
        for episode in late:
            self._fail(
                episode, f"it took more than {self.settings.program.timeout:g} s (program.timeout)"
            )
        self._next_end = min((episode.deadline for episode in self._tasks), default=math.inf)
        return bool(late)

    def _close(self) -> None:
        """Cancel the tasks that episodes have left running, and release all resources."""
        self.context.closed = True
        self.endpoint.close()
        self._tasks.clear()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:  # tasks that suppress their cancellation are then abandoned
            self.loop.run_until_complete(asyncio.wait(left, timeout=PATIENCE))
        self.answers.close()
        self.loop.close()


def _only(error: BaseException) -> BaseException:
    """Return the only error in an exception group (asyncio.TaskGroup raises such groups)."""
    inner: Sequence[BaseException] = getattr(error, "exceptions", ())
    return _only(inner[0]) if len(inner) == 1 else error
