"""Errors that a user can fix, and the notices and warnings that a run prints beside results."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Iterable
from typing import Any

from comlrl.quoting import printable

DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
)  # fmt: skip


class UserError(Exception):
    """A mistake that the user can fix; one line that names the key, the value and what to do.

    A command prints it as ``error: …`` and ends with ``exit_code``.
    """

    exit_code = 2


class ServerError(UserError):
    """A server that samples is of no more use: it has not answered for too long, or not as it
    should. The run ends with a checkpoint."""

    exit_code = 1
    may_pass = False  # whether the same request may succeed later, or elsewhere


class NonFiniteError(RuntimeError):
    """A logit, loss or gradient that is NaN or infinite; ``batch`` is the ``TokenBatch`` that gave
    it, where one is kept."""

    def __init__(self, text: str, batch: Any = None, agent: int | None = None) -> None:
        super().__init__(text)
        self.batch, self.agent = batch, agent


class PeerFailed(RuntimeError):
    """Another process has given up; it says why.

    ``code`` is the exit code. ``saves``: the finished steps are saved before all processes leave.
    """

    def __init__(self, code: int, saves: bool = False) -> None:
        super().__init__("another process failed")
        self.code, self.saves = code, saves


def near(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint for a name that is unknown: the nearest, or all of them in ``otherwise``."""
    names = list(names)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f"did you mean `{close[0]}`?" if close else otherwise.format(", ".join(names) or "none")


def in_one_line(error: Exception) -> tuple[str, int] | None:
    """Return message and exit code of a user's or disk error; None for others."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}", 1
    return None


def report(error: Exception) -> int:
    """Print an error of the user's or the disk's; returns the exit code. Raises others again."""
    printable = in_one_line(error)
    if printable is None:
        raise error
    print_error(printable[0])
    return printable[1]


def print_error(text: str) -> None:
    """Print the line that a command ends with, from whichever process met the error."""
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)


def notice(text: str) -> None:
    """Print a line on stderr, from the first process only; results go to stdout."""
    _write("notice", text)


def warning(text: str) -> None:
    """Print a warning, as ``notice``, for what may spoil a run."""
    _write("warning", text)


def _write(kind: str, text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{kind}: {printable(text)}", file=sys.stderr, flush=True)
