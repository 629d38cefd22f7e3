"""Runs that a command starts, each as its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from comlrl.processes.cores import available_cores

INTERRUPTED = (130, 143, -2, -15)  # exit codes of a process that a signal ended


def last_error(output: str) -> str:
    """Return the last error in a run's output, or else its last line."""
    lines = output.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]


def environment(jobs: int) -> dict[str, str]:
    """Return the environment of one of ``jobs`` runs: an equal share of the cores, unless the
    caller sets a number."""
    cores = available_cores()
    return {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}


def last_line(log: Path) -> str:
    """Return the last error or line of a run's log file."""
    return last_error(log.read_text(encoding="utf-8", errors="replace"))


class ChildRuns:
    """Processes that several threads start and wait for, and that end together."""

    def __init__(self, jobs: int) -> None:
        """Set ``jobs``, the number of runs that share the machine."""
        self._jobs, self._ended = jobs, False
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, line: Sequence[str], log: Path) -> int:
        """Run a command line to its end, append its output to ``log``, and return its exit code."""
        with log.open("ab") as output:
            with self._lock:
                if self._ended:
                    return -signal.SIGTERM
                process = subprocess.Popen(
                    line,
                    stdout=output,
                    stderr=output,
                    env=environment(self._jobs),
                    start_new_session=True,  # Ctrl-C reaches us alone, and they get one signal
                )
                self._processes.add(process)
            code = process.wait()
            with self._lock:
                self._processes.discard(process)
        return code

    def end(self) -> None:
        """Terminate the runs in progress, and start no more."""
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.terminate()
