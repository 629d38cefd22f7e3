"""The life cycle of a training process: maps errors, signals and failures of other processes to
an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from comlrl.errors import (
    NonFiniteError,
    PeerFailed,
    ServerError,
    UserError,
    in_one_line,
    print_error,
)
from comlrl.loop.interrupts import Interrupted, Signals
from comlrl.quoting import one_line

if TYPE_CHECKING:
    from comlrl.loop.loop import Loop

CONTINUE = "once that is fixed, continue with --resume"


@dataclass
class LifeCycle:
    """State of a training process, from its first check on."""

    signals: Signals
    raises: bool  # raise errors that the user has to fix, instead of printing them
    opened: ExitStack = field(default_factory=ExitStack)  # closed after an error is printed
    code: int = 0
    # Whether the other processes wait for news of an error, as they do until training begins.
    awaited: bool = True
    loop: Loop | None = None  # set when training begins
    write_pages: Callable[[], None] = lambda: None

    def begin_training(self, loop: Loop, write_pages: Callable[[], None]) -> None:
        """Record that training begins, so that errors can save a checkpoint. ``write_pages``:
        called if the run is interrupted."""
        self.loop, self.write_pages, self.awaited = loop, write_pages, False

    def end(self, error: Exception) -> None:
        """Set the exit code and report the error, once for all processes.

        Re-raises errors of the program itself; with ``raises``, raises the others as UserError.
        """
        if isinstance(error, PeerFailed):
            self.code = error.code
            if error.saves:
                self._save()
            return
        if _lost_peer(error):
            self.code = 1
            _say_interrupted("another process ended (see its message)")
            return
        line = self._in_one_line(error)
        if line is None:
            raise error
        text, self.code = line
        saves = self.loop is not None and isinstance(error, ServerError)
        first = True
        if saves or self._is_awaited(error):
            first = _tell(self.code, saves)
        if first and not self.raises:
            print_error(text)
        if saves:
            self._save()
        if self.raises:
            raise error if isinstance(error, UserError) else UserError(text) from error

    def interrupt(self, interrupted: Interrupted) -> None:
        """Close the loggers of a run that a signal has ended, then write its pages."""
        if self.loop is None or interrupted.path is None:
            return
        from comlrl.processes import distributed

        distributed.all_gather("interrupted")  # keeps the others alive while the main process saves
        self.opened.close()
        if distributed.is_main():
            self.write_pages()

    def _in_one_line(self, error: Exception) -> tuple[str, int] | None:
        """Return message and exit code; None: a bug in the program."""
        line = in_one_line(error)
        if self.loop is None:
            return line
        from safetensors import SafetensorError

        if isinstance(error, OSError) and line is not None:
            return f"{line[0]}; {CONTINUE}", line[1]
        if isinstance(error, NonFiniteError):
            from comlrl.update.non_finite import explanation

            return explanation(error, self.loop.counters.steps + 1, self.loop.run_dir), 1
        if isinstance(error, SafetensorError):  # the disk is full; reading has ended by now
            return f"weights could not be saved: {one_line(str(error))}; {CONTINUE}", 1
        return line

    def _is_awaited(self, error: Exception) -> bool:
        """Return whether other processes are waiting at the point where this one failed."""
        if self.loop is None:
            return self.awaited
        from comlrl.loop.checkpoint import CheckpointError

        return isinstance(error, CheckpointError)  # only the main process writes checkpoints

    def _save(self) -> None:
        """Save the state before a step whose sampling cannot be finished."""
        loop = self.loop
        if loop is None:
            return
        path = loop.leave() if _is_main() else None
        _say_interrupted(
            f"saved {path}; continue with --resume" if path else "nothing new to save yet"
        )


@contextmanager
def life_cycle(*, raises: bool = False) -> Iterator[LifeCycle]:
    """Set ``LifeCycle.code`` when the process ends, and print a line that says why.

    0: success. 1: a server, the disk, a non-finite number or another process failed. 2: the user's
    mistake. 130 and 143: SIGINT and SIGTERM. Errors of the program itself are raised.

    Args:
        raises: raise UserError and Interrupted, for callers from Python.
    """
    with ExitStack() as handlers:
        life = LifeCycle(Signals(), raises)
        with suppress(ValueError):  # only the main thread can handle signals
            handlers.enter_context(life.signals)
        try:
            with life.opened:
                try:
                    yield life
                except Interrupted as interrupted:
                    life.interrupt(interrupted)
                    raise
                except Exception as error:
                    life.end(error)
        except Interrupted as interrupted:
            if raises:
                raise
            life.code = interrupted.code
            _say_interrupted(str(interrupted))


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say_interrupted(text: str) -> None:
    if _is_main():
        print(f"interrupted: {text}", file=sys.stderr)


def _lost_peer(error: Exception) -> bool:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False  # torch was never loaded
    from comlrl.processes import distributed

    return distributed.lost_peer(error)


def _tell(code: int, saves: bool) -> bool:
    """Tell all processes that this one ends; return whether it should print the reason."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from comlrl.processes import distributed

    if saves:
        return distributed.give_up(code, saves=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by torchrun once the first process exits
    distributed.start()
    first = distributed.give_up(code)
    distributed.stop()
    return first
