"""Starts the sandboxed process at one of three levels, and tells which of them works here.

``bubblewrap`` and ``unshare`` give it namespaces of its own; ``limits`` does not. Standard
library only: the process that runs the tests loads this file too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEVELS = ("bubblewrap", "unshare", "limits")  # best first
CHOICES = ("auto", "namespaces", *LEVELS)
START_SECONDS = 30.0
KILL_SECONDS = 10.0  # for the end of a program's processes and files
PREFIX = "comlrl-sandbox-"  # of directories for temporary files
_DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
_LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
_MODULES = ("wire", "confine", "candidate")  # of this package, handed over as source


class SandboxError(ValueError):
    """An isolation that is unknown or that this machine does not offer."""

    user_error = True  # told in one line, exit code 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    timeout: float  # seconds of wall-clock time for each test
    memory_mb: int  # address space of each process, MiB
    cpu_seconds: int = 600  # of one process; the wall clock ends a program long before


class Sandbox:
    """The sandboxed process and the control socket to it. Raises SandboxError at the start."""

    def __init__(self, level: str, limits: Limits, parent: str | None = None) -> None:
        self.level = level
        self.directory = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        self.control, theirs = socket.socketpair()
        config = {
            "level": level,
            "slot": os.getpid(),
            "memory_mb": limits.memory_mb,
            "cpu_seconds": limits.cpu_seconds,
            "visible": visible_paths(),
            "devices": _DEVICES,
            "root": self.directory,
            "scratch": self.directory if level == "limits" else "/tmp",
        }
        command = [os.path.realpath(sys.executable), "-s", "-S", "-B", "-c", _bootstrap(config)]
        if level == "bubblewrap":
            command = [*_bubblewrap(), *command]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": os.defpath},
                cwd="/",
            )
        except OSError as error:
            self.control.close()
            remove_tree(self.directory)
            raise SandboxError(f"sandbox.isolation: {level} does not start: {error}") from None
        finally:
            theirs.close()
        self.killing = False
        self.idle: socket.socket | None = None  # to a process that can take a harmless program
        self._await_ready()

    def _await_ready(self) -> None:
        self.control.settimeout(START_SECONDS)
        ready = self._receive(3)
        if len(ready) < 3:
            self.process.kill()
            assert self.process.stderr is not None
            lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            self.close()
            reason = lines[-1] if lines else "no answer"
            raise SandboxError(f"sandbox.isolation: {self.level} does not start: {reason}")
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.control.settimeout(KILL_SECONDS)
        self.restricts_files, self.filters_calls = bool(ready[1]), bool(ready[2])

    def fork(self) -> socket.socket:
        """A channel to a fresh process. Raises OSError where the sandbox is gone."""
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self.control, [b"F"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def kill(self) -> None:
        """Asks for the end of all processes and files of the program."""
        self._hang_up()
        if self.killing:
            return
        self.killing = True
        with contextlib.suppress(OSError):  # the sandbox is gone; wait_killed says so
            self.control.sendall(b"K")

    def _hang_up(self) -> None:
        if self.idle is not None:
            self.idle.close()
            self.idle = None

    def take_idle(self) -> socket.socket | None:
        """The channel to the process that was left to the next harmless program, if any."""
        channel, self.idle = self.idle, None
        return channel

    def wait_killed(self) -> int | None:
        """Status of the program's first process (−9: it was still running); None: sandbox gone."""
        reply = self._receive(4)
        self.killing = False
        return struct.unpack("<i", reply)[0] if len(reply) == 4 else None

    def settle(self) -> bool:
        """Waits until nothing of the last program is left; False where the sandbox is gone."""
        if self.idle is not None:
            self.kill()
        if self.killing:
            return self.wait_killed() is not None
        return self.process.poll() is None

    def _receive(self, size: int) -> bytes:
        data = b""
        try:
            while len(data) < size and (more := self.control.recv(size - len(data))):
                data += more
        except OSError:  # timed out, or reset
            return b""
        return data

    def close(self) -> None:
        """Ends the sandbox with all its processes and files."""
        self._hang_up()
        self.control.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        remove_tree(self.directory)


def remove_tree(directory: str) -> None:
    """Removes a scratch, however deep and whatever its modes."""
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, "--", directory], check=False, stderr=subprocess.DEVNULL)


def visible_paths() -> list[str]:
    """What the sandbox shows, read-only: the Python installation and the system's libraries."""
    wanted = [
        *_LIBRARIES,
        f"{sys.base_prefix}/lib",
        f"{sys.base_exec_prefix}/lib",
        f"{sys.base_exec_prefix}/lib64",
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.realpath(sys.executable),
    ]
    shown: list[str] = []
    for path in sorted({os.path.normpath(p) for p in wanted if p and os.path.exists(p)}, key=len):
        if not any(path.startswith(f"{parent}/") for parent in shown):
            shown.append(path)
    return shown


def _bubblewrap() -> list[str]:
    executable = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:{os.defpath}")
    if executable is None:
        raise SandboxError("sandbox.isolation: bubblewrap is not installed")
    command = [executable, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--as-pid-1", "--die-with-parent", "--cap-drop", "ALL"]
    if os.getuid() == 0:  # to take another user's id inside
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    shown = visible_paths()
    parents = {parent for path in (*shown, *_DEVICES) for parent in Path(path).parents[:-1]}
    for parent in sorted(parents):
        command += ["--dir", str(parent)]  # else readable by root alone
    for path in shown:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for path in _DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--perms", "1777", "--size", str(16 << 20), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _bootstrap(config: dict[str, Any]) -> str:
    """A program that defines this package's modules from their source, then serves."""
    here = Path(__file__).parent
    sources = {name: (here / f"{name}.py").read_text() for name in _MODULES}
    return f"""
import sys, types
sys.path = [path for path in sys.path if path]
for name in ("rewards", "rewards.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in {sources!r}.items():
    module = types.ModuleType("rewards.sandbox." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["rewards.sandbox"], name, module)
    exec(compile(source, name, "exec"), module.__dict__)
module.main({config!r})
"""


@functools.cache
def failure(level: str) -> str | None:
    """Why a level cannot be used on this machine; None if it can. Tried once."""
    try:
        sandbox = Sandbox(level, Limits(timeout=1.0, memory_mb=512))
        sandbox.kill()
        status = sandbox.wait_killed()
        sandbox.close()
    except SandboxError as error:
        return str(error)
    return None if status is not None else f"sandbox.isolation: {level} does not answer"


def choose(isolation: str) -> str:
    """The level to use. Raises SandboxError for one that is unknown or not offered here."""
    if isolation not in CHOICES:
        raise SandboxError(f"sandbox.isolation: {isolation!r} is none of {', '.join(CHOICES)}")
    wanted = {"auto": LEVELS, "namespaces": LEVELS[:2]}.get(isolation, (isolation,))
    for level in wanted:
        if failure(level) is None:
            return level
    reasons = "; ".join(str(failure(level)).removeprefix("sandbox.isolation: ") for level in wanted)
    raise SandboxError(
        f"sandbox.isolation: {isolation} is not possible on this machine ({reasons}); install "
        "bubblewrap or allow user namespaces, or set sandbox.isolation: auto"
    )
