"""How many threads torch computes with: one for each core that other programs leave idle.

The threads of an operation wait for each other at its end. Where one of them shares its core with
another program, every small operation can take a whole time slice: steps on SmolLM2 took 17 to 25
times as long beside one busy loop with two threads on two cores, and 1.2 times with one.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from comlrl.errors import notice
from comlrl.processes import distributed

STAT = Path("/proc/stat")
WINDOW = 0.5  # seconds that the load is watched at least: 50 ticks of the kernel's count
STATE = "cpu_threads"  # of a checkpoint's state: threads, and cores of the machine


class LoadWatch:
    """Counts from its making what other programs compute."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._others = _others_seconds()

    def set_threads(self, state: Mapping[str, Any] | None = None) -> None:
        """Choose the number of threads for this process, where nobody has: not the user
        (``OMP_NUM_THREADS``), not torchrun, and no GPU computes.

        ``state``: of the checkpoint that is continued, whose number is taken on a machine of as
        many cores, since the order of floating-point sums depends on it.
        """
        alone = distributed.world_size() == 1
        if "OMP_NUM_THREADS" in os.environ or not alone or torch.cuda.is_available():
            return
        threads, cores = (state or {}).get(STATE, (0, 0))
        if cores == _cores():
            torch.set_num_threads(threads)
            return
        busy = self._busy_cores()
        threads = idle_cores(torch.get_num_threads(), _cores(), busy)
        if threads < torch.get_num_threads():
            notice(
                f"other programs keep {busy:.1f} of {_cores()} cores busy: computing with "
                f"{threads} thread{'s' * (threads > 1)} (OMP_NUM_THREADS sets another number)"
            )
            torch.set_num_threads(threads)

    def _busy_cores(self) -> float:
        """What others compute with on average; 0 where the system does not tell."""
        if self._others is None:
            return 0.0
        time.sleep(max(0.0, self._time + WINDOW - time.monotonic()))
        now = _others_seconds()
        assert now is not None
        return max(0.0, now - self._others) / (time.monotonic() - self._time)


def idle_cores(threads: int, cores: int, busy: float) -> int:
    """Of ``threads``, as many as find an idle core, at least one."""
    return max(1, min(threads, cores - round(busy)))


def state() -> dict[str, tuple[int, int]]:
    """What a checkpoint keeps."""
    return {STATE: (torch.get_num_threads(), _cores())}


def _cores() -> int:
    """Those that this process may use."""
    return len(_allowed()) or os.cpu_count() or 1


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _others_seconds() -> float | None:
    """CPU seconds of all other processes on these cores, since some time; None where the system
    does not tell."""
    try:
        text = STAT.read_text(encoding="ascii")
    except OSError:
        return None
    return busy_seconds(text, _allowed()) - own_seconds()


def busy_seconds(stat: str, cores: Collection[int]) -> float:
    """CPU seconds of all programs on ``cores``, from the text of ``/proc/stat``."""
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for name, *counts in map(str.split, stat.splitlines()):
        if name in names:
            user, nice, system, _, _, interrupts, soft_interrupts = map(int, counts[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
