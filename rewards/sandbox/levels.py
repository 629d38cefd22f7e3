"""Detection of the isolation levels that work on this machine."""

from __future__ import annotations

import functools
import os

from comlrl.rewards.sandbox import folders
from comlrl.rewards.sandbox.launch import Limits, Sandbox, SandboxError

LEVELS = ("bubblewrap", "unshare", "limits")  # best first
CHOICES = ("auto", "namespaces", *LEVELS)
INSTALL = (
    "install bubblewrap (apt install bubblewrap, dnf install bubblewrap, or conda install -c "
    "conda-forge bubblewrap) or allow user namespaces"
)


@functools.cache
def _probe(level: str) -> tuple[str | None, tuple[str, ...]]:
    """Start a level once; return the reason if it fails, else None, and its missing guarantees."""
    folder, lock = folders.claim()
    try:
        sandbox = Sandbox(level, Limits(timeout=1.0, memory_mb=512), folder)
        sandbox.kill()
        status = sandbox.wait_killed()
        sandbox.close()
    except SandboxError as error:
        return str(error), ()
    finally:
        folders.remove_tree(folder)
        os.close(lock)
    if status is None:
        return f"sandbox.isolation: {level} does not answer", ()
    return None, sandbox.missing


def failure(level: str) -> str | None:
    """Return the reason why a level cannot be used on this machine, or None if it can."""
    return _probe(level)[0]


def missing(level: str) -> tuple[str, ...]:
    """Return the guarantees that a usable level lacks on this machine."""
    return _probe(level)[1]


def choose(isolation: str) -> str:
    """Return the level to use for ``sandbox.isolation``.

    Raises SandboxError if it is unknown or not available.
    """
    if isolation not in CHOICES:
        raise SandboxError(f"sandbox.isolation: {isolation!r}; use one of {', '.join(CHOICES)}")
    wanted = {"auto": LEVELS, "namespaces": LEVELS[:2]}.get(isolation, (isolation,))
    for level in wanted:
        if failure(level) is None:
            return level
    reasons = "; ".join(str(failure(level)).removeprefix("sandbox.isolation: ") for level in wanted)
    raise SandboxError(
        f"sandbox.isolation: {isolation} is not possible on this machine ({reasons}); "
        f"{INSTALL}, or set sandbox.isolation: auto"
    )
