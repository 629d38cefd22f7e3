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
    """Calls ``when_idle`` whenever no callback is ready, and ``each_round`` otherwise.

    ``when_idle(wait)`` gets the seconds until the next timer, or None without timers. It may
    complete futures, and returns how many seconds the loop may wait for timers, threads and
    sockets: None for no limit, 0 after completing a future.
    """

    def __init__(
        self,
        when_idle: Callable[[float | None], float | None],
        each_round: Callable[[], object],
    ) -> None:
        self._events = _Selector(when_idle, each_round)
        super().__init__(self._events)
        self._daemons = DaemonThreads()
        self.in_threads = 0  # pending blocking calls

    @property
    def listens(self) -> bool:
        """Return whether a socket or child process may wake the loop, besides its threads."""
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
    """Hooks into asyncio's loop, which polls its selector in every iteration."""

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
    """Runs each job in a new daemon thread.

    A call that never returns does not delay the exit. Jobs never queue, since a running job may
    wait for a wave that needs the calls of all others.
    """

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        return daemon_threads.start(partial(fn, *args, **kwargs))
