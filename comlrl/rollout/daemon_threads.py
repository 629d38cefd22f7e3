"""Jobs in daemon threads: a run that ends does not wait for answers that it no longer needs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Pool:
    """Jobs as they come; they begin in their order, at most ``at_once`` at a time."""

    def __init__(self, at_once: int) -> None:
        self.at_once, self._running = at_once, 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """The result of ``job``, which does not begin once the future is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, job))
            more = self._running < self.at_once
            self._running += more
        if more:
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, job = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)


def start(jobs: Sequence[Callable[[], T]], at_once: int) -> list[Future[T]]:
    """The results of ``jobs``, which begin in their order, at most ``at_once`` at a time."""
    pool = Pool(at_once)
    return [pool.submit(job) for job in jobs]


def run(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of ``jobs``, all at once. Raises the error of the first that has one, after all
    have ended."""
    futures = start(jobs, len(jobs))
    for future in futures:
        future.exception()
    return [future.result() for future in futures]
