"""The sandboxed process, which forks a child process for each program.

The parent holds no secrets and runs none of the program's code. It reads one-byte commands from its
control socket. ``FORK`` starts a child, which receives the descriptor of its channel over the
second socket. ``KILL`` ends the child and removes all processes and files of the program.
``LOWER`` sets the child to the lowest priority. The child reads the program from its channel, runs
it and answers calls. Whatever the program does to the child or writes to the channel, it can only
forge return values.

Between forks the parent leaves its memory unchanged, so that every program sees the same addresses.
Standard library only: the source of this file and of ``confine``, ``seccomp``, ``replaced_results``
and ``wire`` is passed to a bare interpreter (see ``launch``), which cannot read the repository.
"""

from __future__ import annotations

import _socket
import contextlib
import gc
import marshal
import os
import signal
import struct
import sys
import types
from typing import Any, NoReturn

from comlrl.rewards.sandbox.inside import confine, replaced_results, seccomp, wire

FORK, KILL, LOWER, READY = b"F", b"K", b"L", b"R"
KILLED = struct.Struct("<i?")  # the program's status, and whether the scratch is worn
WORN_BYTES = 64 << 10  # size of an emptied directory: on disk, directories never shrink
PROGRAM = "<program>"
ENTERED = "__entered__"  # the function that a program's helpers call to report that they run
# The modules that solutions import most, loaded before any fork. Every mapping and page slows forks
# down, so rarely used modules are left out, in this file too (``_socket``, not ``socket``).
PRELOADED = ["collections", "copy", "functools", "itertools", "math", "operator", "random"]
PRELOADED += ["re", "string", "typing"]


def main(config: dict[str, Any]) -> NoReturn:
    """Drop all privileges, then serve until the control socket closes."""
    level, scratch, slot = config["level"], config["scratch"], int(config["slot"])
    if level == "bubblewrap":
        confine.mount_over(scratch)
        if not confine.has_fixed_addresses():
            _start_again(slot)
    control, channels = os.dup(0), os.dup(1)
    _preload(level)
    visible, hidden, devices = config["visible"], config["hidden"], config["devices"]
    if level == "unshare":
        confine.enter_namespaces(config["root"], visible, hidden, devices)
        _become_first(control)
    confine.refuse_privileges()
    restricted = False
    if level == "limits":
        confine.adopt_orphans()
        if os.getuid() == 0:
            confine.give_away(scratch, slot)
        restricted = confine.restrict_files(config["readable"], devices, scratch)
    unique_user = confine.drop_identity(slot, keep_reading=restricted)
    os.chdir(scratch)
    confine.limit_resources(config["memory_mb"])
    filtered = seccomp.filter_calls()
    _silence()
    flags = restricted, filtered, confine.has_fixed_addresses(), confine.counts_files(scratch)
    os.write(control, READY + bytes(flags))
    _Zygote(
        control, channels, scratch, config["cpu_seconds"], unique_user or level != "limits"
    ).serve()


def _start_again(slot: int) -> None:
    """Execute Python again with fixed addresses.

    If bubblewrap starts as root, addresses are randomized again; for another user they are not.
    """
    if os.getuid() == 0 and confine.drop_identity(slot, keep_reading=False):
        with confine.fixed_addresses():
            os.execv(sys.executable, sys.orig_argv)


def _preload(level: str) -> None:
    """Import common modules, and make random values the same for all programs."""
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    for name in PRELOADED:
        __import__(name)
    os.register_at_fork = register
    with contextlib.suppress(ImportError):
        __import__("_none_of_this_name")  # makes the importer list and cache every folder
    _seed_everything(sys.modules["random"])
    # Modules with other sources of randomness are blocked: OpenSSL mixes in the clock, and so does
    # SQLite where ``/dev/urandom`` cannot be replaced by a file of fixed bytes.
    refused = ["_ssl", "_sqlite3"] if level == "limits" else ["_ssl"]
    sys.modules.update(dict.fromkeys(refused))  # type: ignore[arg-type]
    confine.forget_random_bytes()


def _seed_everything(module: Any) -> None:
    """Seed ``random`` and everything else that takes its seed from the machine."""
    generator, seed_with = module.Random(0), module.Random.seed

    def seed(self: Any, a: Any = None, version: int = 2) -> None:
        seed_with(self, generator.getrandbits(64) if a is None else a, version)

    module.Random.seed = seed
    module.seed = module._inst.seed
    module._random.Random = module.Random
    system = sys.modules["posix"]
    os.urandom = module._urandom = system.urandom = generator.randbytes  # type: ignore[attr-defined]
    os.getrandom = system.getrandom = lambda size, flags=0: generator.randbytes(size)  # type: ignore[attr-defined]
    module.seed(0)


def _become_first(control: int) -> None:
    """Continue in a child, process 1 of the new PID namespace; the parent waits until it ends."""
    confine.die_with_parent()
    child = os.fork()
    if child:
        os.close(control)
        os.waitpid(child, 0)
        os._exit(0)


def _silence() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Zygote:
    """The process that forks programs.

    ``everything`` says that all processes which it may signal belong to the program.
    """

    def __init__(
        self, control: int, channels: int, scratch: str, cpu_seconds: int, everything: bool
    ) -> None:
        self.control, self.channels, self.scratch = control, channels, scratch
        self.cpu_seconds, self.everything = cpu_seconds, everything
        self.child = self.number = 0  # the program's process, and the number of forks modulo 256
        self.filter = seccomp.program_filter()
        self.worn = False  # the scratch directory has grown and is slow to list

    def serve(self) -> NoReturn:
        assert not self.everything or os.getpid() == 1 or os.getuid() > confine.FIRST_UID
        self._wipe()  # the first call fills Python's free lists, so do it before any fork
        gc.collect()
        gc.freeze()  # forks then share more pages
        while True:
            command = os.read(self.control, 1)
            if command == FORK:
                self.number = (self.number + 1) % 256
                self.child = os.fork()
                if not self.child:
                    self._begin_program()
            elif command == LOWER:
                if self.child:
                    os.setpriority(os.PRIO_PROCESS, self.child, 19)
            elif command == KILL:
                os.write(self.control, KILLED.pack(self._clean(), self.worn))
            else:
                self._clean()
                os._exit(0)

    def _begin_program(self) -> NoReturn:
        """Set up the forked process without the control socket and with fewer rights; run it."""
        channel = _Channel(self.channels, self.number)
        os.close(self.control)
        confine.limit_program(self.cpu_seconds)
        confine.die_with_parent()
        seccomp.install_filter(self.filter)
        try:
            serve_program(channel)
        finally:  # even if the program's error types make their description fail
            os._exit(1)

    def _clean(self) -> int:
        """Kill the program's processes and empty the scratch; return the first one's status."""
        status = 0
        if self.child:  # not yet reaped, so its process id is still valid
            os.kill(-1 if self.everything else self.child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
            self.child = 0
            _reap()
        if not _is_empty(self.scratch):
            self._wipe()
        return status

    def _wipe(self) -> None:
        """Empty the scratch in a separate process, so that this one's memory does not change.

        If a file cannot be removed, this process exits, and the scratch is removed with it.
        """
        janitor = os.fork()
        if not janitor:
            _wipe(self.scratch)
            os._exit(0)
        if os.waitpid(janitor, 0)[1]:
            os._exit(1)
        self.worn = os.stat(self.scratch).st_size > WORN_BYTES


def _reap() -> None:
    """Reap the descendants that the program left; with the seccomp filter there are none."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _is_empty(directory: str) -> bool:
    try:
        return not os.listdir(directory)
    except OSError:
        return False


def _wipe(scratch: str) -> None:
    if os.stat(scratch).st_uid == os.getuid():
        os.chmod(scratch, 0o700)
    for entry in os.scandir(scratch):
        if entry.is_dir(follow_symlinks=False):
            _unlock(entry.path)
            _remove(entry.path)
        else:
            os.unlink(entry.path)


def _unlock(top: str) -> None:
    """Make a tree's directories removable."""
    os.chmod(top, 0o700)
    for directory, names, _ in os.walk(top):
        for path in (os.path.join(directory, name) for name in names):
            if not os.path.islink(path):
                os.chmod(path, 0o700)


def _remove(top: str) -> None:
    for directory, names, files in os.walk(top, topdown=False):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            if name in files or os.path.islink(path):
                os.unlink(path)
            else:
                os.rmdir(path)
    os.rmdir(top)


# --- the program's own process -----------------------------------------------------------------


def serve_program(channel: _Channel) -> NoReturn:
    """Run the program that arrives on the channel, then answer calls until the channel closes."""
    _, payload = channel.receive()
    entry_point, code, replacement = marshal.loads(payload)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    entered: set[str] = set()
    failures: dict[str, bytes] = {}  # names that were not bound → the error of their statement
    module.__dict__[ENTERED] = entered.add
    try:
        if replacement:
            module.__dict__[replaced_results.NAME] = replaced_results.REPLACEMENTS[replacement]
        _load(marshal.loads(code), module.__dict__, entered, failures)
        function = module.__dict__[entry_point]
        module.__dict__.pop(replaced_results.NAME, None)
    except BaseException as error:
        channel.send(wire.LOAD, _describe(error))
        os._exit(0)
    sequence, reply, reported = wire.LOAD, b'["v",null,null]', 0
    while True:
        if len(entered) > reported:
            reported = len(entered)
            reply = reply[:-1] + b"," + wire.dumps(sorted(entered)) + b"]"
        channel.send(sequence, reply)
        sequence, payload = channel.receive()
        reply = answer(function, payload, failures)


def _load(
    statements: list[tuple[types.CodeType, bool, bool, tuple[str, ...]]],
    names: dict[str, Any],
    entered: set[str],
    failures: dict[str, bytes],
) -> None:
    """Run a program's statements.

    If a statement that may fail raises an error, it is stored under the names that the statement
    would have bound. Helpers that run before main's part begins do not count as called by main.
    """
    in_main = False
    for code, must_succeed, is_main, binds in statements:
        if is_main and not in_main:
            in_main = True
            entered.clear()
        try:
            exec(code, names)
        except BaseException as error:
            if must_succeed:
                raise
            failures.update(dict.fromkeys(binds, _describe(error)))


_CHANGEABLE = frozenset({list, dict, set, tuple})  # a tuple may hold one of the others


def answer(function: Any, payload: bytes | bytearray, failures: dict[str, bytes]) -> bytes:
    """Return the reply to a call: its value or exception, and the changed arguments.

    If a name is missing because a statement failed (``import numpy``), the reply is that
    statement's exception.
    """
    arguments, *named = wire.loads(payload)
    keywords = named[0] if named else {}
    inputs = [*arguments, *keywords.values()]
    try:
        value = function(*arguments, **keywords)
    except NameError as error:
        return failures.get(str(error.name)) or _describe(error)
    except BaseException as error:
        return _describe(error)
    try:
        changed = None
        if not _CHANGEABLE.isdisjoint(map(type, inputs)):
            after = wire.call(arguments, keywords)
            changed = [arguments, keywords] if after != payload else None
            for position, argument in enumerate(inputs):
                if value is argument:
                    return wire.dumps(["a", position, changed])
        return wire.dumps(["v", value, changed])
    except wire.Unsupported as error:
        return wire.dumps(["u", str(error), None])
    except RecursionError:
        return wire.dumps(["u", "a value nested too deeply, or holding itself", None])
    except BaseException as error:  # raised by the value's own methods
        return _describe(error)


def _describe(error: BaseException) -> bytes:
    """Encode an exception: the names of its type and base classes, arguments, message and line."""
    names = [kind.__name__ for kind in type(error).__mro__][:20]
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == PROGRAM:
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        message = str(error)[:500]
    except BaseException:
        message = ""
    try:
        arguments = wire.dumps(list(error.args))
    except BaseException:
        arguments = b""
    short = wire.loads(arguments) if 0 < len(arguments) < 2000 else [message]
    return wire.dumps(["e", [names, short, message, line], None])


class _Channel:
    """Reads and writes frames on a descriptor received over a socket; exits when it closes.

    It reads exact sizes, not whatever has arrived, so that addresses do not depend on timing.
    """

    def __init__(self, channels: int, number: int) -> None:
        socket, received = _socket.socket(fileno=channels), -1
        while received != number:  # skip channels of processes that were killed before this point
            data, attached, _, _ = socket.recvmsg(1, _socket.CMSG_SPACE(4))
            self.socket = _socket.socket(fileno=struct.unpack("i", attached[0][2][:4])[0])
            received = data[0]
        socket.close()

    def receive(self) -> tuple[int, bytearray]:
        length, sequence = wire.HEADER.unpack(self._read(wire.HEADER.size))
        return sequence, self._read(length)

    def _read(self, size: int) -> bytearray:
        data = wire.read(self.socket, size, _socket.MSG_WAITALL)
        if len(data) < size:
            os._exit(0)
        return data

    def send(self, sequence: int, payload: bytes) -> None:
        if len(payload) > wire.MAX_BYTES:
            payload = wire.dumps(["u", f"a value of {len(payload)} bytes", None])
        self.socket.sendall(wire.frame(sequence, payload))
