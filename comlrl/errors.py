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
# A path that the user chose and that cannot be one: below a file, an existing folder, too long.
PATH_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


class UserError(Exception):
    """A mistake that the user can fix; the message names key, value and fix in one line.

    A command prints it as ``error: …`` and ends with ``exit_code``.
    """

    exit_code = 2


class ServerError(UserError):
    """A sampling server that no longer answers, or answers incorrectly. The run saves a checkpoint
    and ends."""

    exit_code = 1
    may_pass = False  # whether the same request may succeed later or on another server


class NonFiniteError(RuntimeError):
    """A logit, loss or gradient that is NaN or infinite. ``batch`` is the ``TokenBatch`` that
    caused it, if available."""

    def __init__(self, text: str, batch: Any = None, agent: int | None = None) -> None:
        super().__init__(text)
        self.batch, self.agent = batch, agent


class PeerFailed(RuntimeError):
    """Another process failed, and reports the reason itself.

    ``code`` is the exit code. ``saves``: finished steps are saved before all processes exit.
    """

    def __init__(self, code: int, saves: bool = False) -> None:
        super().__init__("another process failed")
        self.code, self.saves = code, saves


def near(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint for an unknown name: the closest of ``names``, or ``otherwise`` listing all."""
    names = list(names)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f"did you mean `{close[0]}`?" if close else otherwise.format(", ".join(names) or "none")


def in_one_line(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code of a user, disk or path error; None for other errors."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}", 1
    if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename:
        return f"'{error.filename}': {error.strerror}; choose another path", 2
    return None


def report(error: Exception) -> int:
    """Print a user or disk error and return its exit code. Re-raises other errors."""
    printable = in_one_line(error)
    if printable is None:
        raise error
    print_error(printable[0])
    return printable[1]


def print_error(text: str) -> None:
    """Print the error line that a command ends with, on any process."""
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)


def notice(text: str) -> None:
    """Print a line to stderr, on the first process only. Results are printed to stdout instead."""
    _write("notice", text)


def warning(text: str) -> None:
    """Print a warning about something that may spoil a run; like ``notice`` otherwise."""
    _write("warning", text)


def _write(kind: str, text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{kind}: {printable(text)}", file=sys.stderr, flush=True)
