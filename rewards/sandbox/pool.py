"""The trainer's side: judges that run in parallel, each with its own sandbox."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import marshal
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from comlrl.errors import warning
from comlrl.processes.cores import available_cores
from comlrl.rewards.sandbox import folders
from comlrl.rewards.sandbox.checks import split_check
from comlrl.rewards.sandbox.judge import LENGTH
from comlrl.rewards.sandbox.launch import START_SECONDS, SandboxError
from comlrl.rewards.sandbox.levels import INSTALL, choose, failure, missing
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.rewards.sandbox.stand_in import PROGRAM_TIMEOUTS

IN_FLIGHT = 3  # programs sent to a judge: the running one and the next two
SPARE_SECONDS = 60.0  # beyond a program's time limit, before a silent judge is replaced
_ROOT = Path(__file__).parents[__package__.count(".") + 1]  # the root of absolute imports


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and the tests to run against it."""

    code: bytes  # marshalled code of the joint program
    preamble: str  # the prompt's imports and functions, for the tests
    test: str
    entry_point: str
    replacement: str = (
        ""  # how a helper's results are replaced, see ``sandbox.inside.replaced_results``
    )


class _Worker:
    """One judge process. ``await_ready`` raises SandboxError if it does not start."""

    def __init__(self, level: str, timeout: float, memory_mb: int) -> None:
        self.connection, theirs = socket.socketpair()
        self.directory, lock = folders.claim()
        arguments = f"{level!r}, {timeout!r}, {memory_mb!r}, {self.directory!r}"
        program = f"import sys; sys.path += {_folders()!r}; "
        program += f"from {__package__} import judge; judge.main({arguments})"
        environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
        inherited = {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH") if k in os.environ}
        self.process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-s", "-S", "-B", "-c", program],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=environment | inherited,
            cwd="/",
            start_new_session=True,  # the trainer handles Ctrl-C
            pass_fds=[lock],
        )
        theirs.close()
        os.close(lock)  # the judge inherits it, which marks the folder as used until it ends
        self.jobs: deque[int] = deque()
        self.deadline = float("inf")
        self.unsent, self.buffer = bytearray(), bytearray()  # jobs, and partial replies
        self.connection.settimeout(2 * START_SECONDS)

    def await_ready(self) -> None:
        try:
            ready = self.connection.recv(1)
        except OSError:
            ready = b""
        if ready != b"R":
            self.close()
            raise SandboxError("sandbox: a worker did not start; what it printed stands above")
        self.connection.settimeout(None)

    def send(self, index: int, job: Job, allowed: float) -> None:
        body = marshal.dumps((job.code, job.preamble, job.test, job.entry_point, job.replacement))
        if not self.jobs:
            self.deadline = time.monotonic() + allowed
        self.jobs.append(index)
        self.unsent += LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what the judge has room for, without waiting: it may itself wait to send a reply."""
        with contextlib.suppress(OSError):  # full, or dead, which is detected when reading replies
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent, socket.MSG_DONTWAIT)]

    def receive(self) -> list[list]:
        """Return the replies that have arrived. Raises EOFError if the judge has ended."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self.buffer += data
        replies = []
        while len(self.buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.buffer)[0]
            if len(self.buffer) < end:
                break
            replies.append(json.loads(self.buffer[LENGTH.size : end]))
            del self.buffer[:end]
        return replies

    def close(self) -> None:
        """End the judge; its sandbox ends when the control socket closes."""
        self.connection.close()
        try:
            self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if os.path.exists(self.directory):
            folders.remove_tree(self.directory)


def _folders() -> list[str]:
    """Return the folders that a judge imports from: this package's and, for tests, numpy's."""
    numpy = importlib.util.find_spec("numpy")
    beside = [] if numpy is None or numpy.origin is None else [Path(numpy.origin).parents[1]]
    return [str(folder) for folder in (_ROOT, *beside)]


class Pool:
    """Runs jobs on ``workers`` judges (None: one per core), which start at the first call."""

    def __init__(self, workers: int | None, timeout: float, memory_mb: int, isolation: str) -> None:
        self.size = workers or available_cores()
        self.timeout, self.memory_mb = timeout, memory_mb
        self._allowed = PROGRAM_TIMEOUTS * timeout + SPARE_SECONDS  # seconds per job
        self._isolation, self._level = isolation, ""
        self.workers: list[_Worker] = []

    @property
    def isolation(self) -> str:
        """The level in use. Warns once about guarantees that this machine lacks."""
        if not self._level:
            self._level = choose(self._isolation)
            _warn_missing(self._isolation, self._level)
        return self._level

    def run(self, jobs: Iterable[Job]) -> list[tuple[TestOutcome, ...]]:
        """Return each job's outcomes, in order. If a judge dies, the job that it ran fails.

        Jobs are drawn as workers become free, so that creating and running them overlap.
        """
        batch = _Batch(iter(jobs))
        if not batch.refill():
            return []
        try:
            self._start()
            self._run(batch)
        except BaseException:
            self.close()  # some may not have started; late replies would look like the next call's
            raise
        return batch.outcomes

    def _run(self, batch: _Batch) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            while self._feed(batch) or any(worker.jobs for worker in self.workers):
                for worker in self.workers:
                    events = selectors.EVENT_READ | bool(worker.unsent) * selectors.EVENT_WRITE
                    selector.modify(worker.connection, events, worker)
                deadline = min(worker.deadline for worker in self.workers)
                for key, events in selector.select(max(0.0, deadline - time.monotonic())):
                    if events & selectors.EVENT_WRITE:
                        key.data.flush()
                    if events & selectors.EVENT_READ:
                        self._collect(key.data, batch, selector)
                for worker in [w for w in self.workers if w.deadline <= time.monotonic()]:
                    self._replace(worker, batch, selector)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []

    def _start(self) -> None:
        if not self.workers:
            folders.sweep()
            self.workers = [self._worker() for _ in range(self.size)]
            for worker in self.workers:
                worker.await_ready()

    def _worker(self) -> _Worker:
        return _Worker(self.isolation, self.timeout, self.memory_mb)

    def _feed(self, batch: _Batch) -> bool:
        """Send jobs to the least busy workers; return False if none is left."""
        while True:
            worker = min(self.workers, key=lambda w: len(w.jobs))
            if len(worker.jobs) >= IN_FLIGHT:
                return True
            if not batch.refill():
                return False
            index = batch.pending.popleft()
            worker.send(index, batch.jobs[index], self._allowed)

    def _collect(self, worker: _Worker, batch: _Batch, selector: selectors.BaseSelector) -> None:
        try:
            replies = worker.receive()
        except EOFError:
            self._replace(worker, batch, selector)
            return
        for reply in replies:
            batch.finish(worker.jobs.popleft(), reply)
            worker.deadline = time.monotonic() + self._allowed if worker.jobs else float("inf")

    def _replace(self, worker: _Worker, batch: _Batch, selector: selectors.BaseSelector) -> None:
        """Replace a dead worker: its running job fails, and others run the jobs after it."""
        selector.unregister(worker.connection)
        worker.process.kill()
        worker.close()
        if worker.jobs:
            batch.fail(worker.jobs.popleft())
            batch.pending.extendleft(reversed(worker.jobs))
        fresh = self._worker()
        fresh.await_ready()
        self.workers[self.workers.index(worker)] = fresh
        selector.register(fresh.connection, selectors.EVENT_READ, fresh)


@dataclass(slots=True)
class _Batch:
    """The jobs of one call and their outcomes so far."""

    source: Iterator[Job]
    jobs: list[Job] = field(default_factory=list)
    outcomes: list[tuple[TestOutcome, ...]] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)

    def refill(self) -> bool:
        """Return whether a job is pending, after taking one from the source if needed."""
        if not self.pending:
            job = next(self.source, None)
            if job is not None:
                self.pending.append(len(self.jobs))
                self.jobs.append(job)
                self.outcomes.append(())
        return bool(self.pending)

    def tests(self, index: int) -> tuple[str, ...]:
        job = self.jobs[index]
        return _sources(job.test, job.entry_point)

    def finish(self, index: int, reply: list[list]) -> None:
        self.outcomes[index] = tuple(
            TestOutcome(source, *outcome)
            for source, outcome in zip(self.tests(index), reply, strict=True)
        )

    def fail(self, index: int) -> None:
        message = "the tests' process ended while it ran this program"
        self.outcomes[index] = tuple(
            TestOutcome(source, False, "Died", message) for source in self.tests(index)
        )


@functools.lru_cache(maxsize=1024)
def _sources(test: str, entry_point: str) -> tuple[str, ...]:
    return tuple(statement.source for statement in split_check(test, entry_point).tests)


def _warn_missing(isolation: str, level: str) -> None:
    lacking = list(missing(level))
    if isolation == "auto" and level == "limits":
        reasons = "; ".join(filter(None, (failure("bubblewrap"), failure("unshare"))))
        reasons = reasons.replace("sandbox.isolation: ", "")
        lacking.insert(0, f"namespaces ({reasons}; {INSTALL})")
    if lacking:
        warning(
            f"model-written code runs without {', without '.join(lacking)}; see docs/sandbox.md, "
            "and set sandbox.isolation: namespaces to refuse to run without namespaces"
        )
