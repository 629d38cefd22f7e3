"""The trusted process, which runs a task's tests and calls the program through a stand-in.

It loads none of the program's code. ``candidate`` is an object that sends its arguments to the
sandbox and returns the plain value sent back; nothing else reaches this process. It serves one
request at a time, on the socket that is its stdin. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import locale
import marshal
import os
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from comlrl.rewards.sandbox.folders import remove_tree
from comlrl.rewards.sandbox.inside import wire
from comlrl.rewards.sandbox.inside.confine import adopt_orphans
from comlrl.rewards.sandbox.launch import Limits, Sandbox
from comlrl.rewards.sandbox.stand_in import (
    SHORT,
    Candidate,
    Clock,
    Failure,
    SandboxGone,
)
from comlrl.rewards.sandbox.suite import ACTUAL, EXPECTED, Step, suite

LENGTH = struct.Struct("<I")
TOO_LONG = "too long to show"
MEMORY_BYTES = 4 << 30  # of this process
RECURSION_LIMIT, LOCALE = sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL)


def shorten(value: Any) -> str:
    """Return a value's repr, truncated to ``SHORT`` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deeply
        return f"<{type(value).__name__} {TOO_LONG}>"
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def message_of(error: BaseException) -> str:
    """Return an error's message, truncated; it may contain a value from the program."""
    try:
        return str(error)[:SHORT]
    except (ValueError, RecursionError):
        return TOO_LONG


Request = tuple[bytes, str, str, str, str]  # a ``pool.Job``'s fields
# passed, error type, message, line, expected, actual, timed out, seconds, helpers called so far
Outcome = tuple[
    bool, str | None, str | None, int | None, str | None, str | None, bool, float, list[str]
]


def run_tests(sandbox: Sandbox, clock: Clock, request: Request, seconds: float) -> list[Outcome]:
    """Run the tests that fit in ``seconds``; the rest fail. Raises SandboxGone."""
    code, preamble, test, entry_point, replacement = request
    tests = suite(preamble, test, entry_point)
    _reset()
    seed = _seed(test)
    random.seed(seed)
    if "numpy" in test:  # loaded here, off the tests' clock; rows that need it have been checked
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy.random").seed(seed % (1 << 32))
    candidate = Candidate(sandbox, clock, code, entry_point, replacement)
    run = _Run(candidate, clock, only_whether=bool(replacement))
    clock.start_program(seconds)
    stand_ins = dict.fromkeys((tests.parameter, "candidate", entry_point), candidate)
    module: dict[str, Any] = {"__name__": "tests"}
    run.step(tests.preamble, module)
    module.update(stand_ins)
    check: dict[str, Any] | None = None  # the namespace of `check`, a copy of the module's
    for position, step in enumerate(tests.steps):
        candidate.expected = tests.calls[position]
        if step.in_check and check is None:
            check = {**module, **stand_ins}
        run.step(step, check if check is not None else module)
    clock.stop()
    candidate.close()
    return run.outcomes


def _reset() -> None:
    """Undo what the last program's tests may have set for the whole process."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    locale.setlocale(locale.LC_ALL, LOCALE)
    if decimal := sys.modules.get("decimal"):
        decimal.setcontext(decimal.Context())


def _seed(test: str) -> int:
    """Return the seed of a test's random draws: the same in every run, hidden from the sandbox.

    A program that knows the tests and this line could predict the draws, but also the answers.
    """
    return int.from_bytes(
        hashlib.blake2b(test.encode(), key=b"the tests' own draws").digest(), "big"
    )


class _Run:
    """Runs steps in order and collects the tests' outcomes.

    With ``only_whether``, nothing is run after the first failure.
    """

    def __init__(self, candidate: Candidate, clock: Clock, only_whether: bool) -> None:
        self.candidate, self.clock, self.only_whether = candidate, clock, only_whether
        self.outcomes: list[Outcome] = []
        self.broken: dict[str, Failure] = {}  # names that set-up failed to bind

    def step(self, step: Step, names: dict[str, Any]) -> None:
        failure = self._known_failure(step)
        if failure is None:
            start = time.perf_counter()
            failure, rang = self._execute(step, names)
            seconds = time.perf_counter() - start
        else:
            rang, seconds = False, 0.0
        if step.is_test:
            self.outcomes.append(self._outcome(failure, rang, seconds, names))
        elif failure is not None:
            self.broken.update(dict.fromkeys(step.binds, failure))
        elif self.broken:
            for name in step.binds:
                self.broken.pop(name, None)

    def _known_failure(self, step: Step) -> Failure | None:
        """Return the reason for which a step fails without being run, or None."""
        if step.is_test and self.candidate.load_failure is not None:
            return self.candidate.load_failure
        if not self.clock.program_left:
            return ("NotRun", f"not run: {self._all_time()} were over", None)
        if self.only_whether and not all(passed for passed, *_ in self.outcomes):
            return ("NotRun", "not run after a failure", None)
        for name in step.reads & self.broken.keys():
            return self.broken[name]
        return None

    def _execute(self, step: Step, names: dict[str, Any]) -> tuple[Failure | None, bool]:
        """Run a step; return its failure, if any, and whether it timed out."""
        candidate = self.candidate
        candidate.failure = candidate.raised = candidate.last = None
        names.pop(ACTUAL, None)
        names.pop(EXPECTED, None)

        def execute() -> None:
            if step.is_test:
                candidate.load()
            exec(step.code, names)

        error = self.clock.run(execute)
        if candidate.gone:
            raise SandboxGone
        if self.clock.rang:
            return self._timeout(), True
        if candidate.failure is not None:
            return candidate.failure, False
        if error is None:
            return None, False
        if error is candidate.raised:
            return (type(error).__name__, candidate.message, candidate.line), False
        return (type(error).__name__, self._text(error, message_of), None), False

    def _all_time(self) -> str:
        return f"the {self.clock.program_seconds:g} s for all tests of a program"

    def _text(self, value: Any, describe: Callable[[Any], str]) -> str:
        """Describe a value within the time limit; it may come from the program and be large."""
        texts: list[str] = []
        self.clock.run(lambda: texts.append(describe(value)))
        return texts[0] if texts else TOO_LONG

    def _timeout(self) -> Failure:
        candidate = self.candidate
        limit = f"{self.clock.timeout:g} s" if self.clock.program_left else self._all_time()
        failure = ("Timeout", f"more than {limit}", None)
        if candidate.loading:
            candidate.load_failure = failure
        candidate.close()  # the next test's clock runs while the processes end
        return failure

    def _outcome(
        self, failure: Failure | None, rang: bool, seconds: float, names: dict[str, Any]
    ) -> Outcome:
        entered = sorted(self.candidate.entered)
        if failure is None:
            return (True, None, None, None, None, None, False, seconds, entered)
        kind, message, line = failure
        expected = actual = None
        if kind == "AssertionError" and line is None:  # raised by the test, not the program
            if EXPECTED in names:
                expected = self._text(names[EXPECTED], shorten)
            actual = self._text(names.get(ACTUAL, self.candidate.last), shorten)
        timed_out = rang or kind == "Timeout"
        return (False, kind, message or None, line, expected, actual, timed_out, seconds, entered)


class Judge:
    """Runs programs' tests against a sandbox, which is replaced when it ends."""

    def __init__(self, level: str, limits: Limits, directory: str) -> None:
        self.level, self.limits, self.directory = level, limits, directory
        self.clock = Clock(limits.timeout)
        self.sandbox = self._start()

    def _start(self) -> Sandbox:
        return Sandbox(self.level, self.limits, self.directory, is_judges=True)

    def run(self, request: Request) -> list[Outcome]:
        """Return a program's outcomes.

        If the sandbox ends, it is replaced and the program runs once more in its remaining time.
        """
        seconds = self.clock.program_seconds
        for _ in range(2):
            if not self.sandbox.settle() or self.sandbox.worn:
                self._replace()
            try:
                return run_tests(self.sandbox, self.clock, request, seconds)
            except SandboxGone:
                seconds = self.clock.program_left
                self.clock.stop()
                self._replace()
        _, preamble, test, entry_point, _ = request
        tests = [step for step in suite(preamble, test, entry_point).steps if step.is_test]
        message = "the program ended the sandbox"
        return [(False, "Exited", message, None, None, None, False, 0.0, []) for _ in tests]

    def _replace(self) -> None:
        self.sandbox.close()
        self.sandbox = self._start()


def serve(connection: socket.socket, judge: Judge) -> None:
    """Serve requests until the other side closes the connection."""
    while header := wire.read(connection, LENGTH.size):
        body = wire.read(connection, *LENGTH.unpack(header))
        if not body:
            break
        outcomes = judge.run(marshal.loads(body))
        reply = json.dumps(outcomes, ensure_ascii=False).encode("utf-8", "surrogatepass")
        connection.sendall(LENGTH.pack(len(reply)) + reply)
    judge.sandbox.close()


def main(level: str, timeout: float, memory_mb: int, directory: str) -> None:
    """Run a judge. The trainer's pool starts it with a socket as stdin."""
    connection = socket.socket(fileno=os.dup(0))
    adopt_orphans()  # in case a sandbox leaves any
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # stays: the sandbox may be granted more
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    judge = Judge(level, Limits(timeout, memory_mb), directory)
    connection.sendall(b"R")
    serve(connection, judge)
    remove_tree(directory)  # the trainer may have died
