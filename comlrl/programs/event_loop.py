"""An asyncio event loop that reports when nothing in it can continue by itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
from collections.abc import Callable
from functools import partial
from typing import Any

from comlrl.rollout import daemon_threads


class WaveLoop(asyncio.SelectorEventLoop):
    """Calls ``when_idle`` whenever no callback is ready, and ``each_round`` in between.

    ``when_idle(wait)``: ``wait`` is the seconds until the next timer, or None. It may complete
    futures, and returns how long the loop may now wait for timers, threads and sockets, None for
    as long as they take; 0 where it has completed something.
    """

    def __init__(
        self,
        when_idle: Callable[[float | None], float | None],
        each_round: Callable[[], object],
    ) -> None:
        self._events = _Selector(when_idle, each_round)
        super().__init__(self._events)
        self._daemons = DaemonThreads()
        self.in_threads = 0  # blocking calls whose results have not come back

    @property
    def listens(self) -> bool:
        """Return whether a socket or a child process may wake it, besides its threads."""
        return len(self._events.get_map()) > 1

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run a function for ``asyncio.to_thread``; by default in daemon threads."""
        future = super().run_in_executor(executor or self._daemons, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self.in_threads -= 1


class _Selector(selectors.DefaultSelector):
    """asyncio asks its selector in every round, and to wait where nothing is ready."""

    def __init__(
        self,
        when_idle: Callable[[float | None], float | None],
        each_round: Callable[[], object],
    ) -> None:
        super().__init__()
        self._when_idle, self._each_round = when_idle, each_round

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            self._each_round()
            return events
        return super().select(self._when_idle(timeout))


class DaemonThreads(concurrent.futures.Executor):
    """A daemon thread for each job. No exit waits for a call that never returns, and no job waits
    for others, which may wait for a wave that begins when all have asked."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        return daemon_threads.start(partial(fn, *args, **kwargs))
