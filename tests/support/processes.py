"""Processes that a test starts: how they end, whether they run, and whom they started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
GONE = (FileNotFoundError, ProcessLookupError)  # the second: it ended between opening and reading


def python(
    *arguments: str | Path, code: int = 0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Return what Python said with these arguments, in a process that ends with ``code``."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def until(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Wait for a condition, while ``process`` runs."""
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit and (process is None or process.poll() is None)
        time.sleep(0.02)


def gone(pids: Iterable[int]) -> bool:
    """Return whether none of these processes runs any more."""
    return not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except GONE:
        return False


def children(pid: int) -> list[int]:
    """Return the ids of the processes that any thread of a process started."""
    listed: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            listed += map(int, (task / "children").read_text().split())
        except GONE:
            continue
    return listed
