"""Mistakes of the user's, and the one voice in which a run speaks beside its results."""

from __future__ import annotations

import os
import sys
from typing import Any


class UserError(Exception):
    """A mistake that the user can fix; one line that names the key, the value and what to do.

    A command prints it as ``error: …`` and ends with ``exit_code``.
    """

    exit_code = 2


class NonFiniteError(RuntimeError):
    """A logit, loss or gradient that is NaN or infinite; ``batch`` is the ``TokenBatch`` that gave
    it, where one is kept."""

    def __init__(self, text: str, batch: Any = None, agent: int | None = None) -> None:
        super().__init__(text)
        self.batch, self.agent = batch, agent


def report(error: Exception, code: int | None = None) -> int:
    """Print an error as its one line; returns the exit code, ``error``'s own unless given."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return getattr(error, "exit_code", 1) if code is None else code


def notice(text: str) -> None:
    """A line on stderr, from the first process alone. Results go to stdout, this does not."""
    _write("notice", text)


def warning(text: str) -> None:
    """As ``notice``, for what may spoil a run."""
    _write("warning", text)


def _write(kind: str, text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{kind}: {text}", file=sys.stderr, flush=True)
