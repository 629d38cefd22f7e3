"""How long idle OpenMP threads spin before they sleep.

An operation on several threads ends when the last of them has run. libgomp's threads wait for the
next operation in a loop of 300,000 turns, some milliseconds, and hold their cores for that long.
Where another process wants one of the cores, each operation then costs a slice of the scheduler.
A thread that sleeps is woken within some 50 µs and runs at once, so a short loop is enough for the
gaps between operations and leaves the cores to others. ``benchmarks/bench_busy_neighbor.py`` has
both sides.
"""

from __future__ import annotations

import os

SPINS = 1_000  # turns of the loop, of about 15 ns each


def limit_spinning() -> None:
    """Let OpenMP's threads sleep early. To be called before torch is imported, whose libgomp reads
    the environment once; what the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
