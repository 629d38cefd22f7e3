"""The number of torch threads: one for each core that other programs leave idle.

The threads of an operation wait for each other at its end. If one of them shares its core with
another program, every small operation can take a whole time slice. Next to a busy loop on two
cores, decoding with SmolLM2 took 17 and 25 times as long with two threads, and 1.2 with one.
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
from comlrl.processes.cores import available_cores

STAT = Path("/proc/stat")
WINDOW = 0.5  # minimum seconds to measure the load: 50 ticks of the kernel's counters
STATE = "cpu_threads"  # key in a checkpoint's state: threads, cores, processes


class LoadWatch:
    """The load of other programs since its creation."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._others = _others_seconds()

    def set_threads(self, state: Mapping[str, Any] | None = None) -> None:
        """Choose the number of threads of this process.

        Does nothing if ``OMP_NUM_THREADS`` is set, if there are several processes or a GPU, or if
        the process is bound to fewer cores than torch has threads.

        ``state``: of the checkpoint that is resumed. Its number is reused if a single process saved
        it on as many cores, because the order of floating-point sums depends on it.
        """
        alone = distributed.world_size() == 1
        default, cores = torch.get_num_threads(), _cores()
        limited = "OMP_NUM_THREADS" in os.environ or cores < default
        if limited or not alone or torch.cuda.is_available():
            return
        default = min(default, available_cores())  # a container may have few
        busy = self._busy_cores()
        idle = idle_cores(default, cores, busy)
        saved, *machine = (state or {}).get(STATE, (0,))
        as_before = machine == [cores, 1]
        threads = saved if as_before else idle
        reasons = ["as before"] * as_before
        if idle < default:
            reasons.append(f"other programs keep {busy:.1f} of {cores} cores busy")
        if threads != default or idle < threads:
            notice(
                f"computing with {threads} thread{'s' * (threads > 1)}: {'; '.join(reasons)} "
                "(OMP_NUM_THREADS sets another number)"
            )
        torch.set_num_threads(threads)

    def _busy_cores(self) -> float:
        """Return the mean number of cores that others use; 0 if the system does not report it."""
        if self._others is None:
            return 0.0
        time.sleep(max(0.0, self._time + WINDOW - time.monotonic()))
        now = _others_seconds()
        assert now is not None, f"{STAT} could be read before"
        return max(0.0, now - self._others) / (time.monotonic() - self._time)


def idle_cores(threads: int, cores: int, busy: float) -> int:
    """Return how many of ``threads`` have an idle core; at least one."""
    return max(1, min(threads, cores - round(busy)))


def state() -> dict[str, list[int]]:
    """Return the state for a checkpoint."""
    return {STATE: [torch.get_num_threads(), _cores(), distributed.world_size()]}


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _others_seconds() -> float | None:
    """Return CPU seconds of all other processes on these cores.

    None if the system does not report them.
    """
    try:
        return (
            busy_seconds(STAT.read_text(encoding="ascii"), os.sched_getaffinity(0)) - own_seconds()
        )
    except (OSError, ValueError):  # no such file, or another format
        return None


def busy_seconds(stat: str, cores: Collection[int]) -> float:
    """Return CPU seconds of all programs on ``cores``, from the text of ``/proc/stat``."""
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for name, *counts in map(str.split, stat.splitlines()):
        if name in names:
            user, nice, system, _, _, interrupts, soft_interrupts = map(int, counts[:7])
            ticks += user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return CPU seconds of this process, and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
