"""The trusted process: runs a task's tests, with the program behind a stand-in.

It loads no code of the program's. ``candidate`` is an object that sends its arguments to the
sandbox and hands back the plain value that comes in answer; nothing else reaches this process.
Standard library only. One request and one reply at a time, on the socket that is its stdin.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import marshal
import os
import random
import resource
import signal
import socket
import struct
import time
from dataclasses import dataclass
from types import CodeType
from typing import Any

from rewards.checks import Statement, split_check
from rewards.sandbox import wire
from rewards.sandbox.launch import Limits, Sandbox, SandboxError

LENGTH = struct.Struct("<I")
MAX_TIMEOUTS = 3
GRACE_SECONDS = 2.0  # of CPU time, after which a test that cannot be interrupted ends the judge
MEMORY_BYTES = 4 << 30
SHORT = 200  # characters of a value or message in an outcome

# error type, message, line of the program
Failure = tuple[str, str, "int | None"]


class _Stop(BaseException):
    """Ends a test from inside a call; the failure itself stands in ``Candidate.failure``."""


@dataclass(frozen=True, slots=True)
class Step:
    """A statement, ready to run."""

    code: CodeType
    is_test: bool
    in_check: bool
    reads: frozenset[str]
    binds: frozenset[str]


@dataclass(frozen=True, slots=True)
class Suite:
    preamble: CodeType
    parameter: str
    steps: tuple[Step, ...]


@functools.lru_cache(maxsize=1024)
def suite(preamble: str, test: str, entry_point: str) -> Suite:
    """A task's tests, compiled."""
    check = split_check(test, entry_point)
    under_test = {check.parameter, "candidate", entry_point}
    steps = tuple(_step(statement, under_test) for statement in check.statements)
    code = compile(preamble, "<preamble>", "exec", dont_inherit=True)
    return Suite(code, check.parameter, steps)


def _step(statement: Statement, under_test: set[str]) -> Step:
    node = ast.parse(statement.source).body[0]
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    if statement.is_test:
        node = _Recorder(under_test).visit(node)
    module = ast.fix_missing_locations(ast.Module([node], type_ignores=[]))
    return Step(
        compile(module, "<check>", "exec", dont_inherit=True),
        statement.is_test,
        statement.in_check,
        frozenset(n.id for n in names if isinstance(n.ctx, ast.Load)),
        statement.binds,
    )


class _Recorder(ast.NodeTransformer):
    """Makes an assert keep the values it compares: ``assert (actual := …) == (expected := …)``."""

    def __init__(self, under_test: set[str]) -> None:
        self.under_test = under_test

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # its names would be its own

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                swapped = self._mentions(right) and not self._mentions(left)
                names = (
                    ("__expected__", "__actual__") if swapped else ("__actual__", "__expected__")
                )
                node.test.left = _keep(names[0], left)
                node.test.comparators = [_keep(names[1], right)]
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as operand):
                node.test.operand = _keep("__actual__", operand)
                node.test = _expecting(False, node.test)
            case ast.Call() as call:
                node.test = _expecting(True, _keep("__actual__", call))
        return node

    def _mentions(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.under_test for n in ast.walk(node))


def _keep(name: str, value: ast.expr) -> ast.expr:
    return ast.NamedExpr(ast.Name(name, ast.Store()), value)


def _expecting(value: bool, test: ast.expr) -> ast.expr:
    """``[__expected__ := value] and test``: the list is always true."""
    kept = ast.List([_keep("__expected__", ast.Constant(value))], ast.Load())
    return ast.BoolOp(ast.And(), [kept, test])


def shorten(value: Any) -> str:
    """A value's repr, cut."""
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        return f"<{type(value).__name__} too long to show>"
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


class Clock:
    """The wall clock of one statement at a time. Only the main thread of a process can have one."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.armed, self.rang = timeout, False, False
        signal.signal(signal.SIGALRM, self._ring)

    def start(self) -> None:
        self.armed, self.rang = True, False
        # again and again, for a test that catches everything; the CPU clock is the last resort
        signal.setitimer(signal.ITIMER_REAL, self.timeout, 0.5)
        signal.setitimer(signal.ITIMER_PROF, self.timeout + GRACE_SECONDS)

    def stop(self) -> None:
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _ring(self, *_: object) -> None:
        if self.armed:
            self.rang = True
            raise _Stop


class Candidate:
    """The stand-in. Starts the program when it is first needed, and again after it ended."""

    def __init__(self, sandbox: Sandbox, clock: Clock, code: bytes, entry_point: str) -> None:
        self.__name__ = entry_point
        self._sandbox, self._clock = sandbox, clock
        self._payload = marshal.dumps((entry_point, code))
        self._channel: socket.socket | None = None
        self._sequence, self._buffer = random.getrandbits(31), b""
        self.loading = False
        self.failure: Failure | None = None  # of the statement that runs now
        self.load_failure: Failure | None = None  # of the program as a whole
        self.raised: BaseException | None = None
        self.line: int | None = None  # where the program raised it
        self.last: Any = None  # what it returned last

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.failure is not None:
            raise _Stop
        try:
            request = wire.dumps([list(arguments), keywords])
        except (wire.Unsupported, RecursionError) as error:
            raise self._fail("Unsupported", f"argument: {error}") from None
        self.load()
        status, body, changed = self._exchange(request)
        return self._result(status, body, changed, [*arguments, *keywords.values()])

    def load(self) -> None:
        """Runs the program in a fresh process, unless one is there."""
        if self._channel is not None:
            return
        self.loading = True
        try:
            self._channel, self._buffer = self._sandbox.fork(), b""
            self._send(0, self._payload)
            status, body, _ = self._receive(0)
            if status != "v":
                names, _, message, line = body
                raise self._fail(_builtin_name(names), message, line)
        except _Stop:
            self.load_failure = self.failure
            raise
        self.loading = False

    def stop(self) -> int | None:
        """Ends the program's processes; the first one's status."""
        self._clock.armed = False  # an alarm must not break the exchange with the sandbox
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._sandbox.kill()
        return self._sandbox.wait_killed()

    def close(self) -> None:
        """Ends the program's processes, without waiting for their end."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._sandbox.kill()

    def _fail(self, kind: str, message: str, line: int | None = None) -> _Stop:
        self.failure = (kind, message[:SHORT], line)
        return _Stop()

    def _exchange(self, request: bytes) -> tuple[str, Any, Any]:
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        self._send(self._sequence, request)
        return self._receive(self._sequence)

    def _send(self, sequence: int, payload: bytes) -> None:
        assert self._channel is not None
        try:
            self._channel.sendall(wire.HEADER.pack(len(payload), sequence) + payload)
        except OSError:
            raise self._gone() from None

    def _receive(self, sequence: int) -> tuple[str, Any, Any]:
        assert self._channel is not None
        header = wire.HEADER.size
        length = -1
        while length < 0 or len(self._buffer) < header + length:
            try:
                data = self._channel.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                raise self._gone()
            self._buffer += data
            if length < 0 and len(self._buffer) >= header:
                length, answered = wire.HEADER.unpack_from(self._buffer)
                if length > wire.MAX_BYTES or answered != sequence:
                    raise self._forged()
        payload, rest = self._buffer[header : header + length], self._buffer[header + length :]
        if rest:
            raise self._forged()
        self._buffer = b""
        try:
            status, body, changed = wire.loads(payload)
            return status, body, changed
        except (ValueError, TypeError):
            raise self._forged() from None

    def _forged(self) -> _Stop:
        self.stop()
        return self._fail("Protocol", "the program wrote on the sandbox's own channel")

    def _gone(self) -> _Stop:
        status = self.stop()
        if status is None:
            raise SandboxError("the sandbox ended")
        return self._fail("Exited", f"the program ended its process ({_status_text(status)})")

    def _result(self, status: str, body: Any, changed: Any, inputs: list[Any]) -> Any:
        if changed is not None:
            _copy_back(inputs, changed)
        if status == "a":
            self.last = inputs[body]
            return self.last
        if status == "v":
            self.last = body
            return body
        if status == "u":
            raise self._fail("Unsupported", f"result: {body}")
        names, arguments, _, self.line = body
        kind = getattr(builtins, _builtin_name(names))
        self.raised = kind.__new__(kind)
        self.raised.args = tuple(arguments)
        raise self.raised


def _builtin_name(names: list[str]) -> str:
    """The nearest of a type's names that is a builtin exception's."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return str(name)
    return "Exception"


def _status_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _copy_back(inputs: list[Any], changed: list[Any]) -> None:
    """Makes the arguments equal to what the program left in them."""
    arguments, keywords = changed
    for old, new in zip(inputs, [*arguments, *keywords.values()], strict=True):
        _renew(old, new)


def _renew(old: Any, new: Any) -> Any:
    """``old`` with the content of ``new``, the same object where it can be changed."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [*map(_renew, old, new), *new[len(old) :]]
    elif isinstance(old, dict) and isinstance(new, dict):
        items = {
            key: _renew(old[key], value) if key in old else value for key, value in new.items()
        }
        old.clear()
        old.update(items)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        items = tuple(map(_renew, old, new))
        return old if all(a is b for a, b in zip(old, items, strict=True)) else items
    else:
        return new
    return old


# passed, error type, message, line, expected, actual, timed out, seconds
Outcome = tuple[
    bool, "str | None", "str | None", "int | None", "str | None", "str | None", bool, float
]


def run_tests(
    sandbox: Sandbox, clock: Clock, request: tuple[bytes, str, str, str]
) -> list[Outcome]:
    """The outcome of each test. Raises SandboxError where the sandbox ended by itself."""
    code, preamble, test, entry_point = request
    tests = suite(preamble, test, entry_point)
    random.seed(0)
    candidate = Candidate(sandbox, clock, code, entry_point)
    run = _Run(candidate, clock)
    stand_ins = dict.fromkeys((tests.parameter, "candidate", entry_point), candidate)
    module: dict[str, Any] = {"__name__": "tests"}
    run.step(Step(tests.preamble, False, False, frozenset(), frozenset()), module)
    module.update(stand_ins)
    check: dict[str, Any] | None = None  # the names of `check`, over those of its module
    for step in tests.steps:
        if step.in_check and check is None:
            check = {**module, **stand_ins}
        run.step(step, check if check is not None else module)
    candidate.close()
    return run.outcomes


class _Run:
    """Runs steps in order and keeps the tests' outcomes."""

    def __init__(self, candidate: Candidate, clock: Clock) -> None:
        self.candidate, self.clock = candidate, clock
        self.outcomes: list[Outcome] = []
        self.timeouts = 0
        self.broken: dict[str, Failure] = {}  # names that set-up failed to bind

    def step(self, step: Step, names: dict[str, Any]) -> None:
        failure = self._known_failure(step)
        if failure is None:
            start = time.perf_counter()
            failure, rang = self._execute(step, names)
            seconds = time.perf_counter() - start
            self.timeouts += rang
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
        """Why a step fails without being run."""
        if step.is_test and self.candidate.load_failure is not None:
            return self.candidate.load_failure
        if self.timeouts >= MAX_TIMEOUTS:
            return ("NotRun", f"not run after {MAX_TIMEOUTS} timeouts", None)
        for name in step.reads & self.broken.keys():
            return self.broken[name]
        return None

    def _execute(self, step: Step, names: dict[str, Any]) -> tuple[Failure | None, bool]:
        """Why the step failed, and whether its time ran out."""
        candidate, error = self.candidate, None
        candidate.failure = candidate.raised = candidate.last = None
        names.pop("__actual__", None)
        names.pop("__expected__", None)
        try:
            self.clock.start()
            if step.is_test:
                candidate.load()
            exec(step.code, names)
            self.clock.armed = False
        except BaseException as caught:
            error = caught
        self.clock.stop()
        if self.clock.rang:
            return self._timeout(), True
        if candidate.failure is not None:
            return candidate.failure, False
        if isinstance(error, SandboxError):
            raise error
        if error is None:
            return None, False
        line = candidate.line if error is candidate.raised else None
        return (type(error).__name__, str(error)[:SHORT], line), False

    def _timeout(self) -> Failure:
        candidate = self.candidate
        failure = ("Timeout", f"more than {self.clock.timeout:g} s", None)
        if candidate.loading:
            candidate.load_failure = failure
        if candidate.stop() is None:
            raise SandboxError("the sandbox ended")
        return failure

    def _outcome(
        self, failure: Failure | None, rang: bool, seconds: float, names: dict[str, Any]
    ) -> Outcome:
        if failure is None:
            return (True, None, None, None, None, None, False, seconds)
        kind, message, line = failure
        expected = actual = None
        if kind == "AssertionError":
            if "__expected__" in names:
                expected = shorten(names["__expected__"])
            actual = shorten(names.get("__actual__", self.candidate.last))
        timed_out = rang or kind == "Timeout"
        return (False, kind, message or None, line, expected, actual, timed_out, seconds)


class Judge:
    """A sandbox that is replaced when it ends, and the tests that run against it."""

    def __init__(self, level: str, limits: Limits) -> None:
        self.level, self.limits = level, limits
        self.clock = Clock(limits.timeout)
        self.sandbox = Sandbox(level, limits)

    def run(self, request: tuple[bytes, str, str, str]) -> list[Outcome]:
        """A program's outcomes; a sandbox that ended is replaced and the program run once more."""
        for _ in range(2):
            try:
                if self.sandbox.settle():
                    return run_tests(self.sandbox, self.clock, request)
            except (SandboxError, OSError):
                self.clock.stop()
            self.sandbox.close()
            self.sandbox = Sandbox(self.level, self.limits)
        _, preamble, test, entry_point = request
        tests = [step for step in suite(preamble, test, entry_point).steps if step.is_test]
        message = "the program ended the sandbox"
        return [(False, "Exited", message, None, None, None, False, 0.0) for _ in tests]


def serve(connection: socket.socket, judge: Judge) -> None:
    """Requests until the other side closes."""
    while (header := _read(connection, LENGTH.size)) is not None:
        body = _read(connection, *LENGTH.unpack(header))
        if body is None:
            break
        reply = json.dumps(judge.run(marshal.loads(body))).encode()
        connection.sendall(LENGTH.pack(len(reply)) + reply)
    judge.sandbox.close()


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = connection.recv(min(size - len(data), 1 << 20))
        if not more:
            return None
        data += more
    return data


def main(level: str, timeout: float, memory_mb: int) -> None:
    """What the trainer's pool starts, with its socket as stdin."""
    connection = socket.socket(fileno=os.dup(0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    judge = Judge(level, Limits(timeout, memory_mb))
    connection.sendall(b"R")
    serve(connection, judge)
