"""An event loop for clients of servers, in a daemon thread, so that it never delays a run's end."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def submit(job: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a job; cancelling its future cancels it."""
    return asyncio.run_coroutine_threadsafe(job, event_loop())


async def gather(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run jobs concurrently and return their results.

    Raises the error of the first failed job in the list, after all have ended.
    """
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def run(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run jobs concurrently from another thread, and wait. Raises as ``gather`` does."""
    return submit(gather(jobs)).result()
