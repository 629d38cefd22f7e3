"""Starts the sandboxed process at one of three levels.

``bubblewrap`` and ``unshare`` isolate it in namespaces; ``limits`` does not. Standard library
only, because the process that runs the tests loads this file too.
"""

from __future__ import annotations

import contextlib
import itertools
import marshal
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl.errors import UserError
from comlrl.rewards.sandbox import folders
from comlrl.rewards.sandbox.inside import confine, wire
from comlrl.rewards.sandbox.shown_paths import hidden_paths, readable_paths, visible_paths

START_SECONDS = 30.0
KILL_SECONDS = 10.0  # to end a program's processes and remove its files
_KILLED = struct.Struct("<i?")  # same as ``candidate.KILLED``, which is not imported here
_DEVICES = ["/dev/null", "/dev/zero"]
_MODULES = ("wire", "confine", "seccomp", "replaced_results", "candidate")  # passed as source


class SandboxError(UserError):
    """An isolation level that is unknown or not available on this machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one program."""

    timeout: float  # seconds of wall-clock time for each test
    memory_mb: int  # address space of each process, MiB
    cpu_seconds: int = 600  # per process; the wall-clock limit ends a program long before


class Sandbox:
    """The sandboxed process and its control socket. Raises SandboxError if it does not start.

    ``parent`` is the folder for its files. With ``is_judges``, the calling process starts nothing
    but sandboxes, so ``close`` kills all descendants of that process.
    """

    def __init__(self, level: str, limits: Limits, parent: str, is_judges: bool = False) -> None:
        self.level, self.is_judges = level, is_judges
        self.directory = tempfile.mkdtemp(dir=parent)
        self.slot = _take_slot()
        self.control, theirs = socket.socketpair()
        self.channels, their_channels = socket.socketpair()
        config = {
            "level": level,
            "slot": f"{self.slot:>010}",  # fixed length, because addresses depend on it
            "memory_mb": limits.memory_mb,
            "cpu_seconds": limits.cpu_seconds,
            "visible": visible_paths(),
            "hidden": hidden_paths(),
            "readable": readable_paths() if level == "limits" else [],
            "devices": _DEVICES,
            "root": self.directory,
            "scratch": self.directory if level == "limits" else "/tmp",
        }
        command = [os.path.realpath(sys.executable), "-s", "-S", "-B", "-c", _bootstrap(config)]
        if level == "bubblewrap":
            random_bytes = f"{self.directory}/random"
            confine.write_random_bytes(random_bytes)
            command = [*bubblewrap_command(random_bytes), *command]
        try:
            with confine.fixed_addresses():
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=their_channels.fileno(),
                    stderr=subprocess.PIPE,
                    env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": os.defpath},
                    cwd="/",
                    start_new_session=True,  # in a new process group
                )
        except OSError as error:
            self.control.close()
            self.channels.close()
            folders.remove_tree(self.directory)
            _slots.discard(self.slot)
            raise SandboxError(f"sandbox.isolation: {level} does not start: {error}") from None
        finally:
            theirs.close()
            their_channels.close()
        self.killing, self.number = False, 0  # programs so far, modulo 256
        self.worn = False  # a program's files left the scratch slow for later programs
        self._await_ready()

    def _await_ready(self) -> None:
        self.control.settimeout(START_SECONDS)
        ready = self._receive(5)
        if len(ready) < 5:
            self.process.kill()
            assert self.process.stderr is not None
            lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
            self.close()
            reason = lines[-1] if lines else "no answer"
            raise SandboxError(f"sandbox.isolation: {self.level} does not start: {reason}")
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.control.settimeout(KILL_SECONDS)
        flags = map(bool, ready[1:])
        self.restricts_files, self.filters_calls, self.fixes_addresses, self.counts_files = flags
        for _ in range(3):  # only the first runs change the memory that later programs see
            self.warm_up()

    def warm_up(self) -> None:
        """Run a program that does nothing."""
        code = marshal.dumps(compile("def f(): pass", "<program>", "exec"))
        with contextlib.suppress(OSError):  # the sandbox has ended; its first user reports it
            with self.fork() as channel:
                channel.sendall(wire.frame(wire.LOAD, marshal.dumps(("f", code, ""))))
                channel.recv(wire.READ_BYTES)
            self.kill()
            self.wait_killed()

    @property
    def missing(self) -> tuple[str, ...]:
        """The guarantees of the level that this machine cannot provide."""
        guarantees = {
            "Landlock's rules on files (Linux 5.13)": self.restricts_files
            or self.level != "limits",
            "a seccomp filter on system calls": self.filters_calls,
            "fixed addresses (scores may depend on them)": self.fixes_addresses,
            "a bound on the number of files (bwrap is installed setuid)": self.counts_files
            or self.level == "limits",
        }
        return tuple(name for name, there in guarantees.items() if not there)

    def fork(self) -> socket.socket:
        """Return a channel to a new process. Raises OSError if the sandbox has ended."""
        ours, theirs = socket.socketpair()
        try:
            self.number = (self.number + 1) % 256
            socket.send_fds(self.channels, [bytes([self.number])], [theirs.fileno()])
            self.control.sendall(b"F")
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def kill(self) -> None:
        """Request the removal of all processes and files of the program, without waiting."""
        if self.killing:
            return
        self.killing = True
        with contextlib.suppress(OSError):  # the sandbox has ended; wait_killed reports it
            self.control.sendall(b"K")

    def lower(self) -> None:
        """Set the program to the lowest priority, after it has run for long."""
        with contextlib.suppress(OSError):
            self.control.sendall(b"L")

    def wait_killed(self) -> int | None:
        """Wait until ``kill`` is done; return the status of the program's first process.

        −9 means that it was still running. None means that the sandbox has ended.
        """
        reply = self._receive(_KILLED.size)
        self.killing = False
        if len(reply) < _KILLED.size:
            return None
        status, worn = _KILLED.unpack(reply)
        self.worn = self.worn or worn
        return int(status)

    def settle(self) -> bool:
        """Wait until the last program is cleaned up; return False if the sandbox has ended."""
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
        """End the sandbox with all its processes and files."""
        self.control.close()
        self.channels.close()
        _end_descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        if self.is_judges:
            _end_descendants(os.getpid())  # orphans, see ``confine.adopt_orphans``
        if self.process.stderr is not None:
            self.process.stderr.close()
        folders.remove_tree(self.directory)
        _slots.discard(self.slot)


_slots: set[int] = set()  # of this process's sandboxes
_taking_slot = threading.Lock()


def _take_slot() -> int:
    """Return a number that no other running sandbox on this machine has, for its user's id."""
    with _taking_slot:
        of_process = itertools.count(os.getpid(), 1 << 22)  # process ids are below 2**22
        slot = next(slot for slot in of_process if slot not in _slots)
        _slots.add(slot)
    return slot


def _end_descendants(ancestor: int) -> None:
    """Kill all descendants of a process, until none is left."""
    for _ in range(100):
        running = _descendants(ancestor)
        for pid in running:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not running:
            return


def _descendants(ancestor: int) -> list[int]:
    """Return the running descendants of a process, read from /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = (
                Path(f"/proc/{name}/stat")
                .read_text(encoding="utf-8")
                .rpartition(")")[2]
                .split()[:2]
            )
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(name))
    descendants: list[int] = []
    pending = [ancestor]
    while pending:
        below = children.get(pending.pop(), [])
        descendants += below
        pending += below
    return descendants


def bubblewrap_command(random_bytes: str) -> list[str]:
    """Return the bwrap command line; ``random_bytes`` is a file that replaces random devices."""
    executable = shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:{os.defpath}".strip(":"))
    if executable is None:
        raise SandboxError("sandbox.isolation: bubblewrap is not installed")
    command = [executable, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--as-pid-1", "--die-with-parent", "--cap-drop", "ALL"]
    if os.getuid() == 0:  # to take another user's id inside
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if os.getuid() == 0 or not os.stat(executable).st_mode & stat.S_ISUID:
        command += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount its scratch; dropped afterwards
    shown = visible_paths()
    parents = {parent for path in (*shown, *_DEVICES) for parent in Path(path).parents[:-1]}
    for parent in sorted(parents):
        command += ["--dir", str(parent)]  # otherwise only root can read it
    for path in shown:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for path in hidden_paths():
        command += ["--tmpfs", path, "--remount-ro", path]
    for path in _DEVICES:
        command += ["--dev-bind", path, path]
    for path in confine.RANDOM_DEVICES:
        command += ["--ro-bind", random_bytes, path]
    command += ["--perms", "1777", "--size", str(16 << 20), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _bootstrap(config: dict[str, Any]) -> str:
    """Return a program that defines the modules of ``inside`` from source, then serves.

    It is ASCII, so that it works in every locale.
    """
    here, package = Path(__file__).parent / "inside", f"{__package__}.inside"
    sources = {name: (here / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES}
    parts = package.split(".")
    packages = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return f"""
import sys, types
sys.path = [path for path in sys.path if path]
for name in {packages!a}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, source in {sources!a}.items():
    module = types.ModuleType({package + "."!a} + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules[{package!a}], name, module)
    exec(compile(source, name, "exec"), module.__dict__)
module.main({config!a})
"""
