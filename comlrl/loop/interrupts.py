"""Ctrl-C and a cluster's preemption: a run ends in good order, the second signal ends it at once.

No torch here: the handlers are installed before anything heavy is imported.
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
ECHO_SECONDS = 2.0  # torchrun and the terminal may each deliver one and the same signal


class Interrupted(BaseException):
    """A signal ended the run; ``code`` is the exit code. No ``except Exception`` swallows it."""

    def __init__(self, number: int, path: Path | None = None) -> None:
        self.number, self.code, self.path = number, 128 + number, path
        where = f"saved {path}; continue with --resume" if path else "nothing new to save yet"
        super().__init__(f"{signal.Signals(number).name}: {where}")


class Signals:
    """SIGINT and SIGTERM of this process, from ``__enter__`` to ``__exit__``.

    Until ``defer`` is called (start-up), and inside ``abandoning``, a signal raises Interrupted
    where the process stands. Otherwise it is kept as ``received``, to be asked for between steps.
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
        """Raise Interrupted at a signal, also one that came before, during work that may be
        thrown away."""
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
            for each in NUMBERS:  # the second one is the system's to handle: it leaves at once
                signal.signal(each, signal.SIG_DFL)
        if self._raise_at_once:
            raise Interrupted(number)
        notice(f"{signal.Signals(number).name}: finishing this step, then saving")
