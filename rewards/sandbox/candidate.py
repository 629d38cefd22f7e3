"""Inside the sandbox: one process that forks those that programs run in.

The first process holds no secret and runs nothing of the program's. It takes one-byte commands on
its control socket: ``FORK``, with the descriptor of a new channel, and ``KILL``, after which no
process and no file of the program is left. The forked process gets the program on its channel,
runs it, and answers calls. Whatever the program does to that process or writes on the channel, it
can only make up return values.

Standard library only: the source of this file, ``confine`` and ``wire`` is handed to a bare
interpreter (see ``launch``), because the repository is out of sight here.
"""

from __future__ import annotations

import _socket
import gc
import marshal
import os
import resource
import signal
import struct
import sys
import types
from typing import Any, NoReturn

from rewards.sandbox import confine, wire

FORK, KILL, READY = b"F", b"K", b"R"
PROGRAM = "<program>"
# What solutions import most: loaded once, before the forks. A fork copies every mapping and page,
# so compiled modules that few solutions use stay out, here (``_socket``, not ``socket``) and there.
PRELOADED = ["collections", "copy", "functools", "itertools", "math", "operator", "random"]
PRELOADED += ["re", "string", "typing"]
WORN = (32 << 10, 60.0)  # KiB and CPU seconds after which a process takes no further program


def main(config: dict[str, Any]) -> NoReturn:
    """Gives up all rights, then serves until the control socket closes."""
    control = _socket.socket(fileno=os.dup(0))
    _preload()
    level, scratch = config["level"], config["scratch"]
    if level == "unshare":
        confine.enter_namespaces(config["root"], config["visible"], config["devices"])
        _become_first(control)
    confine.refuse_privileges()
    restricted = False
    if level == "limits":
        confine.adopt_orphans()
        if os.getuid() == 0:
            confine.give_away(scratch, config["slot"])
        restricted = confine.restrict_files(config["visible"], config["devices"], scratch)
    own = confine.drop_identity(config["slot"], keep_reading=restricted)
    os.chdir(scratch)
    confine.limit_resources(config["memory_mb"])
    filtered = confine.filter_calls(deny_signals=False)
    _silence()
    control.sendall(READY + bytes([restricted, filtered]))
    everything = own or level != "limits"
    _Zygote(control, scratch, config["cpu_seconds"], everything, level == "limits").serve()


def _preload() -> None:
    """Imports, and seeds ``random`` for all programs: its own seeding after a fork is left out."""
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    for name in PRELOADED:
        __import__(name)
    os.register_at_fork = register
    sys.modules["random"].seed(0)


def _become_first(control: _socket.socket) -> None:
    """Continue as process 1 of the new PID namespace; the caller waits for its end."""
    confine.die_with_parent()
    child = os.fork()
    if child:
        control.close()
        os.waitpid(child, 0)
        os._exit(0)


def _silence() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Zygote:
    """``everything``: all processes that it may signal are the program's."""

    def __init__(
        self,
        control: _socket.socket,
        scratch: str,
        cpu_seconds: int,
        everything: bool,
        deny_signals: bool,
    ) -> None:
        self.control, self.scratch, self.cpu_seconds = control, scratch, cpu_seconds
        self.everything, self.deny_signals = everything, deny_signals
        self.child = 0

    def serve(self) -> NoReturn:
        gc.collect()
        gc.freeze()  # forks then share more pages
        while True:
            command, attached, _, _ = self.control.recvmsg(1, _socket.CMSG_SPACE(4))
            if command == FORK:
                self._fork(struct.unpack("i", attached[0][2][:4])[0])
            elif command == KILL:
                self.control.sendall(struct.pack("<i", self._clean()))
            else:
                self._clean()
                os._exit(0)

    def _fork(self, descriptor: int) -> None:
        self.child = os.fork()
        if self.child == 0:
            self.control.close()
            confine.limit_program(self.cpu_seconds, confine.MAX_TASKS if self.everything else 0)
            if self.deny_signals:
                confine.filter_calls(deny_signals=True)
            serve_program(descriptor)
        os.close(descriptor)

    def _clean(self) -> int:
        """Ends every process of the program and empties the scratch; the first one's status."""
        try:
            if self.everything:
                assert os.getpid() == 1 or os.getuid() > confine.FIRST_UID
                os.kill(-1, signal.SIGKILL)
            elif self.child:
                os.kill(self.child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        status = 0
        while True:
            try:
                pid, raw = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if pid == self.child:
                status = os.waitstatus_to_exitcode(raw)
        self.child = 0
        self._wipe()
        return status

    def _wipe(self) -> None:
        """Raises, which ends this process and with it the scratch, if a file cannot be removed."""
        if os.stat(self.scratch).st_uid == os.getuid():
            os.chmod(self.scratch, 0o700)
        for entry in os.scandir(self.scratch):
            if entry.is_dir(follow_symlinks=False):
                _unlock(entry.path)
                _remove(entry.path)
            else:
                os.unlink(entry.path)


def _unlock(top: str) -> None:
    """Makes a tree's directories removable."""
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


def serve_program(descriptor: int) -> NoReturn:
    """Runs the programs that arrive on the channel, and answers calls, until it closes.

    A second program comes only if all of them are harmless (see ``rewards.harmless``); it finds
    nothing of the one before. A process that has grown or worked for long ends itself instead.
    """
    channel, start, module = _Channel(descriptor), _usage(), types.ModuleType("program")
    function = None
    while True:
        sequence, payload = channel.receive()
        if sequence != wire.LOAD:
            channel.send(sequence, answer(function, payload))
            continue
        if any(now - first > most for now, first, most in zip(_usage(), start, WORN, strict=True)):
            os._exit(0)
        module.__dict__.clear()  # functions and their names hold each other
        module = types.ModuleType("program")
        sys.modules["program"] = module
        entry_point, code = marshal.loads(payload)
        try:
            exec(marshal.loads(code), module.__dict__)
            function = module.__dict__[entry_point]
        except BaseException as error:
            channel.send(wire.LOAD, _describe(error))
            os._exit(0)
        channel.send(wire.LOAD, b'["v",null,null]')


def _usage() -> tuple[float, float]:
    """Memory at its most, in KiB, and CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss, usage.ru_utime + usage.ru_stime


_CHANGEABLE = frozenset({list, dict, set, tuple})  # a tuple may hold one of the others


def answer(function: Any, payload: bytes) -> bytes:
    """One call's reply: its value or exception, and the arguments that it changed."""
    arguments, *named = wire.loads(payload)
    keywords = named[0] if named else {}
    inputs = [*arguments, *keywords.values()]
    try:
        value = function(*arguments, **keywords)
    except BaseException as error:
        return _describe(error)
    try:
        changed = None
        if not _CHANGEABLE.isdisjoint(map(type, inputs)):
            after = wire.call(arguments, keywords)
            changed = [arguments, keywords] if after != payload else None
            for position, given in enumerate(inputs):
                if value is given:
                    return wire.dumps(["a", position, changed])
        return wire.dumps(["v", value, changed])
    except wire.Unsupported as error:
        return wire.dumps(["u", str(error), None])
    except RecursionError:
        return wire.dumps(["u", "a value nested too deeply, or holding itself", None])
    except BaseException as error:  # raised by the value's own methods
        return _describe(error)


def _describe(error: BaseException) -> bytes:
    """An exception: the names of its types, nearest first, its arguments, message and line."""
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
    """Frames on a descriptor; the process ends with the channel."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.buffer = descriptor, b""

    def receive(self) -> tuple[int, bytes]:
        size = wire.HEADER.size
        while True:
            if len(self.buffer) >= size:
                length, sequence = wire.HEADER.unpack_from(self.buffer)
                if len(self.buffer) >= size + length:
                    payload = self.buffer[size : size + length]
                    self.buffer = self.buffer[size + length :]
                    return sequence, payload
            data = os.read(self.descriptor, wire.READ_BYTES)
            if not data:
                os._exit(0)
            self.buffer += data

    def send(self, sequence: int, payload: bytes) -> None:
        if len(payload) > wire.MAX_BYTES:
            payload = wire.dumps(["u", f"a value of {len(payload)} bytes", None])
        data = wire.frame(sequence, payload)
        while data:
            data = data[os.write(self.descriptor, data) :]
