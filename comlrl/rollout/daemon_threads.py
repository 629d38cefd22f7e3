"""Jobs in daemon threads: a run that ends does not wait for results that it no longer needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(job: Callable[[], T]) -> Future[T]:
    """Start a job in a new thread, and return its future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that gives it up can still wait for its end

    def work() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
