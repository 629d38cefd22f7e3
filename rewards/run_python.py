"""Runs Python code that a model wrote in the sandbox: a tool for programs.

    from comlrl.rewards.run_python import run_python

    result = await asyncio.to_thread(run_python, code)
    if not result.ok:
        print(result.report)

The code runs in a fresh process of the sandbox (docs/sandbox.md), without network, access to your
files or child processes, and with bounded time and memory. The result is reported by that process,
so the code can forge it.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from comlrl.processes.cores import available_cores
from comlrl.quoting import without_surrogates
from comlrl.rewards.sandbox import folders
from comlrl.rewards.sandbox.inside import wire
from comlrl.rewards.sandbox.launch import Limits, Sandbox, SandboxError
from comlrl.rewards.sandbox.levels import choose

MAX_SOURCE = 1 << 20  # characters of code and input together
MAX_OUTPUT = 1 << 16  # characters of output
MAX_ERROR = 2000  # characters
_MAX_REPLY = 12 * (MAX_OUTPUT + MAX_ERROR) + 100  # bytes; JSON escapes a character with up to 12
_RUNNER = compile(
    f"""
def run(source, given):
    import io, sys
    written = io.StringIO()
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(given), written, written
    error = line = None
    try:
        exec(compile(source, "<code>", "exec"), {{"__name__": "__main__"}})
    except SystemExit as raised:
        error = None if raised.code in (None, 0) else "SystemExit: " + str(raised.code)
    except BaseException as raised:
        error = type(raised).__name__ + ": " + str(raised)
        line = raised.lineno if isinstance(raised, SyntaxError) else None
        trace = raised.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<code>":
                line = trace.tb_lineno
            trace = trace.tb_next
    return [written.getvalue()[:{MAX_OUTPUT}], error and error[:{MAX_ERROR}], line]
""",
    "<runner>",
    "exec",
)


@dataclass(frozen=True, slots=True)
class PythonResult:
    """The result of running code."""

    output: str  # stdout and stderr, truncated to ``MAX_OUTPUT`` characters
    error: str | None  # type and message of the error that ended it; None if it ran to its end
    line: int | None = None  # 1-based line of the code that raised the error
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Return whether the code ran to its end."""
        return self.error is None

    @property
    def report(self) -> str:
        """Output and error as one text, for an agent to read."""
        where = "" if self.line is None else f" (line {self.line})"
        last = "" if self.error is None else f"{self.error}{where}"
        return "\n".join(part for part in (self.output.rstrip("\n"), last) if part)


def run_python(
    code: str,
    stdin: str = "",
    *,
    timeout: float = 10.0,
    memory_mb: int = 512,
    isolation: str = "auto",
) -> PythonResult:
    """Run ``code`` as a script that reads ``stdin``.

    Args:
        timeout: seconds of wall-clock time before the process is killed.
        memory_mb: address space in MiB.
        isolation: see ``sandbox.isolation`` in the configuration.

    The call blocks. Up to one run per CPU core is active at a time; further calls wait.
    Raises ValueError for more than ``MAX_SOURCE`` characters, and SandboxError if this machine does
    not support the isolation.
    """
    if len(code) + len(stdin) > MAX_SOURCE:
        raise ValueError(f"run_python accepts at most {MAX_SOURCE} characters of code and input")
    level = choose(isolation)
    with _slots:
        cell = _take(level, memory_mb)
        try:
            return cell.run(code, stdin, timeout)
        finally:
            _give_back(cell)


class _Cell:
    """A sandbox that runs one program after another."""

    def __init__(self, level: str, memory_mb: int) -> None:
        self.kind = (level, memory_mb)
        self.folder, self.lock = folders.claim()
        self.usable = True
        try:
            self.sandbox = Sandbox(level, Limits(timeout=1.0, memory_mb=memory_mb), self.folder)
        except SandboxError:
            self._leave()
            raise

    def run(self, code: str, stdin: str, timeout: float) -> PythonResult:
        self.usable = False  # until its program has been seen to end, also if this is interrupted
        deadline = time.monotonic() + timeout
        try:
            with self.sandbox.fork() as channel:
                program = marshal.dumps(("run", marshal.dumps([(_RUNNER, True, True, ())]), ""))
                request = wire.call([code, stdin], {})
                channel.settimeout(timeout)
                channel.sendall(wire.frame(wire.LOAD, program) + wire.frame(1, request))
                _receive(channel, wire.LOAD, deadline)
                result = _result(_receive(channel, 1, deadline))
        except TimeoutError:
            text = f"TimeoutError: it took more than {timeout:g} s"
            result = PythonResult("", text, timed_out=True)
        except (OSError, ValueError):
            result = PythonResult("", "ProcessEnded: the code ended its process")
        self.sandbox.kill()
        self.usable = self.sandbox.wait_killed() is not None and not self.sandbox.worn
        return result

    def close(self) -> None:
        self.sandbox.close()
        self._leave()

    def _leave(self) -> None:
        folders.remove_tree(self.folder)
        os.close(self.lock)


def _result(reply: Any) -> PythonResult:
    """Parse a reply, which the code may have forged. Raises ValueError if it is not a result."""
    match reply:
        case ["v", [str() as output, None | str() as error, None | int() as line], _]:
            if isinstance(line, bool) or not 0 < (line or 0) <= MAX_SOURCE:
                line = None
            return PythonResult(
                without_surrogates(output[:MAX_OUTPUT]),
                None if error is None else without_surrogates(error[:MAX_ERROR]),
                line,
            )
    raise ValueError("not a result")


def _receive(channel: socket.socket, wanted: int, deadline: float) -> Any:
    """Receive a reply. Raises TimeoutError, OSError if the process ended, ValueError if invalid."""
    length, number = wire.HEADER.unpack(_read(channel, wire.HEADER.size, deadline))
    if length > _MAX_REPLY or number != wanted:
        raise ValueError("not a reply")
    try:
        # Without wire's tags: their sets and dicts are built in C, for minutes if hashes collide.
        return json.loads(_read(channel, length, deadline), object_pairs_hook=_refuse)
    except RecursionError:
        raise ValueError("not a reply") from None


def _refuse(_: object) -> Any:
    raise ValueError("a result holds no objects")


def _read(channel: socket.socket, size: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
        more = channel.recv(min(size - len(data), wire.READ_BYTES))
        if not more:
            raise OSError("the process ended")
        data += more
    return data


_slots = threading.BoundedSemaphore(available_cores())
_idle: list[_Cell] = []
_changing = threading.Lock()
_starter = ThreadPoolExecutor(1)  # a sandbox dies with the thread that started it


def _take(level: str, memory_mb: int) -> _Cell:
    with _changing:
        for cell in _idle:
            if cell.kind == (level, memory_mb):
                _idle.remove(cell)
                return cell
        return _starter.submit(_Cell, level, memory_mb).result()


def _give_back(cell: _Cell) -> None:
    with _changing:
        if cell.usable:
            _idle.append(cell)
            return
    cell.close()


@atexit.register
def _close_all() -> None:
    with _changing:
        while _idle:
            _idle.pop().close()
