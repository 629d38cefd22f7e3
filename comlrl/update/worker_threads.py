"""Independent pieces of work side by side on the CPU's cores.

Each piece gets a thread and an equal share of the intra-op threads, which it may use to run pieces
in parallel itself. Small models spend their time in many small operations: two OpenMP threads
hardly speed these up and, on a busy machine, slow them down many times over. On a GPU, pieces run
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def worker_threads(device: torch.device) -> int:
    """Return the number of jobs that run in parallel."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def run_parallel(
    jobs: Sequence[Callable[[], T]], device: torch.device, allowed: bool = True
) -> list[T]:
    """Run the jobs and return their results, in order. A job's error is raised when those beside it
    have ended.

    As many at once as there are cores; what is then left over shares all of them. ``allowed``
    false: one after the other, as they share what only one can use.
    """
    cores = worker_threads(device) if allowed else 1
    left_over = len(jobs) % cores
    full = len(jobs) - left_over
    return _at_once(jobs[:full], cores, 1) + _at_once(
        jobs[full:], left_over, cores // max(1, left_over)
    )


def _at_once(jobs: Sequence[Callable[[], T]], workers: int, threads: int) -> list[T]:
    if workers < 2:
        return [job() for job in jobs]
    with ThreadPoolExecutor(workers, initializer=lambda: _set_threads(threads)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def _set_threads(threads: int) -> None:
    # A thread's first read takes the number that any thread set last. Read before setting, so that
    # a later read returns this thread's number.
    torch.get_num_threads()
    torch.set_num_threads(threads)
