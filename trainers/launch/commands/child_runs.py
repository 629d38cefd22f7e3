"""Runs that a command starts as separate processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl.processes.cores import available_cores

INTERRUPTED = (130, 143, -2, -15)  # exit codes after SIGINT or SIGTERM
POLL_SECONDS = 0.1
_LIBC = ctypes.CDLL(None)  # must be loaded before the fork


@dataclass(frozen=True, kw_only=True)
class ChildRun:
    """One process: a training run or an evaluation."""

    key: Any  # identifies the run for the caller
    line: Sequence[str]
    log: Path  # the output is appended to this file
    result: Path  # the run has finished if this file exists


def run_all(
    runs: Iterable[ChildRun], jobs: int
) -> Generator[tuple[ChildRun, str | None, float], None, None]:
    """Run processes, ``jobs`` at a time. Yield each as it ends, with its error (None: it
    succeeded) and its wall seconds.

    ``runs`` is advanced only when a process can start, so it may depend on earlier results. A run
    that has already finished is yielded without starting a process. Ctrl-C, SIGTERM and closing
    the generator terminate the processes and wait for them, so that trainings can save. No process
    outlives this one, even if it is killed.

    Raises KeyboardInterrupt even if a process was interrupted from outside.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pending = iter(runs)
    running: dict[subprocess.Popen[bytes], tuple[ChildRun, float]] = {}
    try:
        while True:
            while len(running) < jobs and (run := next(pending, None)) is not None:
                if run.result.exists():
                    yield run, None, 0.0
                else:
                    running[_start(run, jobs)] = run, time.monotonic()
            if not running:
                return
            time.sleep(POLL_SECONDS)
            for process in [p for p in running if p.poll() is not None]:
                run, started = running.pop(process)
                if process.returncode in INTERRUPTED:
                    raise KeyboardInterrupt
                error = None
                if process.returncode:
                    output = run.log.read_text(encoding="utf-8", errors="replace")
                    error = f"exit code {process.returncode}: {last_error(output)}"
                yield run, error, time.monotonic() - started
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _start(run: ChildRun, jobs: int) -> subprocess.Popen[bytes]:
    """Start a process with an equal share of the cores, unless the caller sets a number."""
    threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // jobs))}
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as output:
        return subprocess.Popen(
            run.line,
            stdout=output,
            stderr=output,
            env=threads | os.environ,
            start_new_session=True,  # keeps the terminal's Ctrl-C from the child
            preexec_fn=lambda: _LIBC.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG: kill with us
        )


def last_error(output: str) -> str:
    """Return the last error in a run's output, or its last line if there is none."""
    lines = output.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]
