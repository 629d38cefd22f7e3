"""``candidate`` as the tests see it: a callable whose calls are executed in the sandbox.

Calls that are evident from the tests' source are sent ahead with the program, so that the two
processes need not wait for each other. A reply is used only for exactly the call that it answers.

Standard library only, because this runs in the tests' process.
"""

from __future__ import annotations

import builtins
import marshal
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from comlrl.rewards.sandbox.inside import wire
from comlrl.rewards.sandbox.launch import Sandbox

PROGRAM_TIMEOUTS = 3  # time limit for all tests of a program, in multiples of one test's
GRACE_SECONDS = 1.0
LONG_SECONDS = 1.0  # in one test, after which a program is set to the lowest priority
AHEAD_BYTES = 1 << 16  # of calls sent ahead: less than the channel's buffer
MAX_ENTERED = 40  # helpers that a program reports as called, and characters of their names
MAX_LINE = 1 << 20  # a line number that a program reports; a program may take 1 MiB
SHORT = 200  # characters of a value or message in an outcome

Failure = tuple[str, str, int | None]  # error type, message, line of the program


class Stop(BaseException):
    """Ends a test from inside a call; the reason is stored out of reach of the test."""


class SandboxGone(BaseException):
    """The sandboxed process has ended unexpectedly."""


class Clock:
    """Time limits on each statement and on all statements of a program (wall-clock time).

    It uses signals, so only the main thread of a process can create one.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout, self.program_seconds = timeout, PROGRAM_TIMEOUTS * timeout
        self.armed, self.rang = False, False
        self.when_long: Callable[[], None] = lambda: None
        self._end = self._program_end = 0.0
        signal.signal(signal.SIGALRM, self._ring)

    def start_program(self, seconds: float) -> None:
        """Start a program's time limit: ``seconds`` for all its statements.

        A timer of CPU time kills this process if a call cannot be interrupted.
        """
        self._program_end = time.monotonic() + seconds
        signal.setitimer(signal.ITIMER_PROF, self.program_seconds + GRACE_SECONDS)

    @property
    def program_left(self) -> float:
        """Seconds that the program still has, at least 0."""
        return max(0.0, self._program_end - time.monotonic())

    def run(self, action: Callable[[], None]) -> BaseException | None:
        """Run an action within a statement's time limit and return the exception it raised.

        On a timeout ``rang`` is set and the result is None. If the program has no time left, the
        action does not run.
        """
        error, seconds = None, min(self.timeout, self.program_left)
        self.rang = not seconds
        if self.rang:
            return None
        try:
            try:
                self.armed = True
                self._end = time.monotonic() + seconds
                # repeatedly, in case a test catches everything
                signal.setitimer(signal.ITIMER_REAL, min(seconds, LONG_SECONDS), 0.5)
                action()
            except BaseException as caught:
                error = caught
            self.armed = False
        except Stop:
            pass  # the alarm rang just after the action ended
        self.armed = False
        return None if self.rang else error

    def stop(self) -> None:
        """Stop the clock between programs."""
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _ring(self, *_: object) -> None:
        if not self.armed:
            return
        left = self._end - time.monotonic()
        if left <= 0:
            self.rang = True
            raise Stop
        self.when_long()
        signal.setitimer(signal.ITIMER_REAL, left, 0.5)


class Candidate:
    """The stand-in. Starts the program when it is first needed, and again after it has ended."""

    def __init__(
        self, sandbox: Sandbox, clock: Clock, code: bytes, entry_point: str, replacement: str
    ) -> None:
        self.__name__ = entry_point
        self._sandbox, self._clock = sandbox, clock
        clock.when_long = sandbox.lower
        self._payload = marshal.dumps((entry_point, code, replacement))
        self._channel: socket.socket | None = None
        self._sequence = int.from_bytes(os.urandom(3), "little")
        self._buffer = bytearray()  # partial replies
        self.expected: Sequence[bytes] = ()  # calls to send ahead; set before the program starts
        self._sent: deque[tuple[bytes, int]] = deque()  # calls sent ahead and not yet made
        self.loading = False
        self.gone = False  # the sandbox ended unexpectedly
        self.failure: Failure | None = None  # of the running statement
        self.load_failure: Failure | None = None  # of the program as a whole
        self.raised: BaseException | None = None
        self.line: int | None = None  # where the program raised ``raised``
        self.message = ""  # of ``raised``
        self.last: Any = None  # the last returned value
        self.entered: set[str] = set()  # helpers called so far, as reported by the program

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.failure is not None or self._clock.rang:
            raise Stop
        try:
            request = wire.call(arguments, keywords)
        except (wire.Unsupported, RecursionError) as error:
            raise self._fail("Unsupported", f"argument: {error}") from None
        self.load()
        status, body, changed = self._exchange(request)
        return self._result(status, body, changed, [*arguments, *keywords.values()])

    def load(self) -> None:
        """Load the program unless it is already loaded."""
        if self._channel is not None:
            return
        self.loading = True
        try:
            status, body, _ = self._start()
            if status != "v":
                try:
                    names, _, message, line = body
                    name = _builtin_name(names)
                except (ValueError, TypeError):
                    raise self._forged() from None
                raise self._fail(name, message, line)
        except Stop:
            self.load_failure = self.failure
            raise
        self.loading = False

    def _start(self) -> tuple[str, Any, Any]:
        """Start the program in a fresh process and return the reply."""
        try:
            if not self._sandbox.settle():
                raise OSError("the sandbox ended")
            self._channel = self._sandbox.fork()
        except OSError:
            self.gone = True
            raise SandboxGone from None
        try:
            self._hand_over()
        except OSError:
            raise self._gone() from None
        return self._receive(wire.LOAD)

    def _hand_over(self) -> None:
        """Send the program and the calls that are certain to follow."""
        self._sent.clear()
        self._buffer = bytearray()
        frames, size = [wire.frame(wire.LOAD, self._payload)], 0
        for request in self.expected:
            size += len(request)
            if size > AHEAD_BYTES:
                break
            self._sequence += 1
            self._sent.append((request, self._sequence))
            frames.append(wire.frame(self._sequence, request))
        assert self._channel is not None
        self._channel.sendall(b"".join(frames))

    def stop(self) -> int | None:
        """End the program's processes; return the first one's status, None if the sandbox ended."""
        self._clock.armed = False  # an alarm must not break the exchange with the sandbox
        self.close()
        return self._sandbox.wait_killed()

    def close(self) -> None:
        """End the program's processes, without waiting for their end."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._sandbox.kill()

    def _fail(self, kind: str, message: str, line: Any = None) -> Stop:
        self.failure = (kind, str(message)[:SHORT], _line_number(line))
        return Stop()

    def _exchange(self, request: bytes) -> tuple[str, Any, Any]:
        if self._sent:
            expected, sequence = self._sent.popleft()
            if request == expected:
                return self._receive(sequence)
            self._restart()
        self._sequence += 1
        self._send(wire.frame(self._sequence, request))
        return self._receive(self._sequence)

    def _restart(self) -> None:
        """Restart the program, because the test makes other calls than were sent ahead."""
        self.expected = ()
        if self.stop() is None:
            self.gone = True
            raise SandboxGone
        self._clock.armed = True
        self.load()

    def _send(self, data: bytes) -> None:
        assert self._channel is not None
        try:
            self._channel.sendall(data)
        except OSError:
            raise self._gone() from None

    def _receive(self, sequence: int) -> tuple[str, Any, Any]:
        assert self._channel is not None
        header, length = wire.HEADER.size, -1
        while True:
            if length < 0 and len(self._buffer) >= header:
                length, answered = wire.HEADER.unpack_from(self._buffer)
                if length > wire.MAX_BYTES or answered != sequence:
                    raise self._forged()
            if 0 <= length <= len(self._buffer) - header:
                break
            if not self._await_data():
                raise self._gone()
        payload = self._buffer[header : header + length]
        del self._buffer[: header + length]
        if self._buffer and not self._sent:
            raise self._forged()
        try:
            status, body, changed, *entered = wire.loads(payload)
            for name in (*entered, ())[0][:MAX_ENTERED]:
                if len(self.entered) < MAX_ENTERED:
                    self.entered.add(str(name)[:MAX_ENTERED])
            return status, body, changed
        except (ValueError, TypeError):
            raise self._forged() from None

    def _await_data(self) -> bool:
        """Wait for more reply data; return False at the end of the stream."""
        assert self._channel is not None
        try:
            data = self._channel.recv(wire.READ_BYTES)
        except OSError:
            return False
        self._buffer += data
        return bool(data)

    def _forged(self) -> Stop:
        self.stop()
        return self._fail("Protocol", "the program wrote to the sandbox's connection")

    def _gone(self) -> Stop:
        status = self.stop()
        if status is None:
            self.gone = True
            raise SandboxGone
        return self._fail("Exited", f"the program ended its process ({_status_text(status)})")

    def _result(self, status: str, body: Any, changed: Any, inputs: list[Any]) -> Any:
        error = None
        try:
            if changed is not None:
                _copy_back(inputs, changed)
            if status == "a":
                body = inputs[body]
            elif status == "e":
                error = self._error(*body)
            elif status not in ("v", "u"):
                raise ValueError(status)
        except (ValueError, TypeError, LookupError, AttributeError):
            raise self._forged() from None
        if status == "u":
            raise self._fail("Unsupported", f"result: {body}")
        if error is not None:
            self.raised = error
            raise error
        self.last = body
        return body

    def _error(self, names: Any, arguments: Any, message: Any, line: Any) -> BaseException:
        """Return the nearest builtin exception, or RuntimeError for one that ends an iteration.

        ``StopIteration`` would end a test's ``map`` or ``filter`` early and let the test pass.
        """
        self.message = str(message)[:SHORT]
        self.line = _line_number(line)
        name = _builtin_name(names)
        if name in ("StopIteration", "StopAsyncIteration", "GeneratorExit"):
            self.message = f"the program raised {name}"
            return RuntimeError(self.message)
        kind = getattr(builtins, name)
        raised: BaseException = kind.__new__(kind)
        raised.args = tuple(arguments)
        return raised


def _line_number(line: Any) -> int | None:
    """Return a line number from the program, None if it is not one or too large to pass on."""
    return line if isinstance(line, int) and 0 < line <= MAX_LINE else None


_GROUP = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11


def _builtin_name(names: list[str]) -> str:
    """Return the first of a type's base-class names that is a builtin exception."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if not isinstance(kind, type) or issubclass(kind, _GROUP):  # a group needs its errors
            continue
        if issubclass(kind, BaseException):
            return str(name)
    return "Exception"


def _status_text(status: int) -> str:
    if status == -signal.SIGKILL:
        return "it was killed, or closed its connection to the tests"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _copy_back(inputs: list[Any], changed: list[Any]) -> None:
    """Apply the program's changes to the arguments."""
    arguments, keywords = changed
    for old, new in zip(inputs, [*arguments, *keywords.values()], strict=True):
        _renew(old, new)


def _renew(old: Any, new: Any) -> Any:
    """Return ``old`` updated to the content of ``new``: the same object if it is mutable."""
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
        parts = tuple(map(_renew, old, new))
        return old if all(a is b for a, b in zip(old, parts, strict=True)) else parts
    else:
        return new
    return old
