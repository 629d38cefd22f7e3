"""Runs independent jobs in parallel on the CPU's cores.

Each job gets a thread and an equal share of the intra-op threads, with which it may run further
jobs in parallel. Small models spend their time in many small operations: two OpenMP threads
hardly speed these up and, on a busy machine, slow them down many times over. On a GPU, jobs run
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
    """Run the jobs and return their results, in order. An error in one is raised after the jobs
    that run in parallel to it have ended.

    As many jobs run at once as there are cores; the remaining jobs then share all cores. With
    ``allowed`` false they run sequentially, because they use a resource that cannot be shared.
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
    # The first ``get_num_threads`` in a thread adopts the number that any thread set last. Call it
    # before setting, so that later calls return this thread's number.
    torch.get_num_threads()
    torch.set_num_threads(threads)
