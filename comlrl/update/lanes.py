"""Independent pieces of work side by side on the CPU's cores.

A thread for each piece with one intra-op thread each: small models spend their time in many small
operations, which two OpenMP threads hardly speed up and, on a busy machine, slow down many times
over. On a GPU pieces run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def lanes(device: torch.device) -> int:
    """How many pieces run at once."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def side_by_side(
    jobs: Sequence[Callable[[], T]], device: torch.device, allowed: bool = True
) -> list[T]:
    """Results of the jobs, in order. A job's error is raised when all have ended.

    ``allowed`` false: one after the other, as they share what only one can use.
    """
    workers = min(lanes(device), len(jobs)) if allowed else 1
    if workers < 2:
        return [job() for job in jobs]
    with ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(1)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
