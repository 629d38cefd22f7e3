"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return the number of usable cores, at most the container's CPU quota, rounded up."""
    cores = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min([cores, *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yield the CPU quota, in cores, of each enclosing control group of cgroup v1 and v2."""
    for folder in _groups():
        try:
            if (unified := folder / "cpu.max").is_file():
                quota, period = unified.read_text(encoding="ascii").split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):  # no quota, or an unreadable one
            continue


def _groups() -> Iterator[Path]:
    """Yield the visible folders of this process's control groups."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in (*lines, "0::/", "0:cpu:/"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        for mount in (CGROUPS / controllers, CGROUPS / "cpu") if controllers else (CGROUPS,):
            group = mount / path.strip("/")
            while group.is_relative_to(mount):
                yield group
                group = group.parent
