"""Processes that a test started: whether they run, and whom they started."""

from __future__ import annotations

from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError)  # the second: it ended between opening and reading


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
