"""Runs that a command starts as processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

INTERRUPTED = (130, 143, -2, -15)  # exit codes of a process that a signal ended


def last_line(log: Path) -> str:
    """The error in a run's output, else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]


def environment(jobs: int) -> dict[str, str]:
    """Of one of ``jobs`` runs: an equal share of the cores, unless the caller sets a number."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}
