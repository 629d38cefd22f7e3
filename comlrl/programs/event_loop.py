"""An asyncio event loop that says when nothing in it can go on by itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import selectors
import threading
from collections.abc import Callable
from typing import Any

THREADS = 32  # that blocking calls have at once


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
        """Whether a socket or a child process may wake it, beside its own threads."""
        return len(self._events.get_map()) > 1

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """What ``asyncio.to_thread`` uses; by default in daemons, for which no exit waits."""
        future = super().run_in_executor(executor or self._daemons, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self.in_threads -= 1

    def close(self) -> None:
        self._daemons.shutdown(wait=False)
        super().close()


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
    """A pool of daemon threads: a run that ends does not wait for a call that never returns."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._jobs.put((future, fn, args, kwargs))
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, fn, args, kwargs = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
