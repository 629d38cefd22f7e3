"""Jobs in daemon threads: a run that ends does not wait for answers that it no longer needs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(jobs: Sequence[Callable[[], T]], at_once: int) -> list[Future[T]]:
    """The results of ``jobs``, which begin in their order, at most ``at_once`` at a time."""
    futures: list[Future[T]] = [Future() for _ in jobs]
    waiting = deque(zip(futures, jobs, strict=True))

    def work() -> None:
        while True:
            try:
                future, job = waiting.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)

    for _ in jobs[:at_once]:
        threading.Thread(target=work, daemon=True).start()
    return futures


def run(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of ``jobs``, all at once. Raises the error of the first that has one, after all
    have ended."""
    futures = start(jobs, len(jobs))
    for future in futures:
        future.exception()
    return [future.result() for future in futures]
