"""Handles Ctrl-C and preemption: the first signal ends a run cleanly, the second immediately.

Without torch, because the handlers are installed before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from comlrl.errors import notice

NUMBERS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 2.0  # torchrun and the terminal may both deliver the same signal


class Interrupted(BaseException):
    """A signal ended the run; ``code`` is the exit code. ``except Exception`` does not catch it."""

    def __init__(self, number: int, path: Path | None = None) -> None:
        self.number, self.code, self.path = number, 128 + number, path
        where = f"saved {path}; continue with --resume" if path else "nothing new to save yet"
        super().__init__(f"{signal.Signals(number).name}: {where}")


class Signals:
    """A context manager that handles SIGINT and SIGTERM in this process.

    Until ``defer`` is called (start-up), and inside ``abandoning``, a signal raises Interrupted
    immediately. Otherwise it is stored in ``received``, which the caller checks between steps.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raise_at_once = True
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in NUMBERS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """Defer signals from now on, so that work is not interrupted; the caller checks
        ``received`` and ends the run."""
        self._raise_at_once = False

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer signals for a stage, of the start-up or of a step."""
        before, self._raise_at_once = self._raise_at_once, False
        try:
            yield
        finally:
            self._raise_at_once = before
        if before and self.received is not None:
            raise Interrupted(self.received)

    @contextlib.contextmanager
    def abandoning(self) -> Iterator[None]:
        """Raise Interrupted at a signal, even an earlier one, during work that may be
        discarded."""
        self._raise_at_once = True
        try:
            if self.received is not None:
                raise Interrupted(self.received)
            yield
        finally:
            self._raise_at_once = False

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._first < ECHO_SECONDS:  # torchrun's echo of the first
                return
            os._exit(128 + number)
        self.received, self._first = number, time.monotonic()
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            for each in NUMBERS:  # the default handler ends the process at the second signal
                signal.signal(each, signal.SIG_DFL)
        if self._raise_at_once:
            raise Interrupted(number)
        notice(f"{signal.Signals(number).name}: finishing this step, then saving")
