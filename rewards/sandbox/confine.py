"""What the sandboxed process gives up, by direct system calls. Standard library only.

Three layers, each used where the kernel has it: namespaces of its own (``enter_namespaces``, what
bubblewrap does where that is installed), Landlock rules on files, and a seccomp filter on system
calls. Resource limits and an identity without rights are there everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Callable, Iterator

SCRATCH_BYTES = 16 << 20  # of files in the scratch directory
FILE_BYTES = 8 << 20  # of one file
MAX_FILES = 64  # open at a time
MAX_TIMERS = 64  # of POSIX, each of which the kernel keeps a signal for
_RLIMIT_SIGPENDING = 11  # not in ``resource``

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> int:
    result = getattr(_libc, function)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


# --- identity and resources --------------------------------------------------------------------

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 4, 8, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
FIRST_UID = 1_900_000_000  # beyond any account; each sandbox takes one for itself
_NOBODY = 65534
_CAP_DAC_READ_SEARCH = 1 << 2


def die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def refuse_privileges() -> None:
    """No program that is started can gain rights; the layers below are refused without this."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_identity(slot: int, keep_reading: bool) -> bool:
    """From root to a user that owns nothing; True if no one else has that user's id.

    ``keep_reading`` keeps the right to read any file, for a Python installation that only root
    can reach; Landlock rules must be in force then.
    """
    own = False
    keep_reading = keep_reading and os.getuid() == 0
    if os.getuid() == 0:
        _call("prctl", _PR_SET_KEEPCAPS, int(keep_reading), 0, 0, 0)
        own = _become(FIRST_UID + slot)
        if not own:
            _become(_NOBODY)
    kept = _CAP_DAC_READ_SEARCH if keep_reading else 0
    capabilities = struct.pack("<6I", kept, kept, 0, 0, 0, 0)
    _call("capset", struct.pack("<Ii", 0x20080522, 0), capabilities)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace, no /proc/PID/mem
    die_with_parent()  # a change of user clears it
    return own


def give_away(directory: str, slot: int) -> None:
    """Makes the scratch the property of the user that root is about to become."""
    try:
        os.chown(directory, FIRST_UID + slot, FIRST_UID + slot)
    except OSError:
        os.chown(directory, _NOBODY, _NOBODY)


def _become(uid: int) -> bool:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # an id that this container does not map
        return False
    return True


def limit_resources(memory_mb: int) -> None:
    """Address space, files, core dumps; hard limits, inherited by every child."""
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        _RLIMIT_SIGPENDING: MAX_TIMERS,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def limit_program(cpu_seconds: int) -> None:
    """CPU time of one program, and no further process or thread; called in its own process."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


# --- addresses ---------------------------------------------------------------------------------

_ADDR_NO_RANDOMIZE, _ASK = 0x0040000, 0xFFFFFFFF


@contextlib.contextmanager
def fixed_addresses() -> Iterator[None]:
    """Programs started in here get no randomized addresses, where the machine allows it."""
    before = _libc.personality(_ASK)
    if before >= 0:
        _libc.personality(before | _ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        if before >= 0:
            _libc.personality(before)


def has_fixed_addresses() -> bool:
    """Whether this process was started without randomized addresses."""
    persona = _libc.personality(_ASK)
    return persona >= 0 and bool(persona & _ADDR_NO_RANDOMIZE)


# --- namespaces, where bubblewrap is not installed ---------------------------------------------

_NEW_USER, _NEW_NS, _NEW_PID, _NEW_NET = 0x10000000, 0x00020000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_UTS = 0x08000000, 0x04000000
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_READ_ONLY, _NOSUID_NODEV = 1, 2 | 4
_SYS_MOUNT_SETATTR = 442
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4  # mount attributes


def enter_namespaces(root: str, visible: list[str], hidden: list[str], devices: list[str]) -> None:
    """New user (if not root), mount, network, IPC and host-name namespaces; PID for children.

    Afterwards ``/`` is read-only and holds ``visible``, with ``hidden`` in it empty, and
    ``devices``; ``/tmp`` is an empty scratch directory. ``root`` is
    an empty directory to build on. Raises OSError where the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS
    _call("unshare", flags if uid == 0 else flags | _NEW_USER)
    if uid != 0:
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID_NODEV, "mode=0755,size=1m")
    for path in visible:
        _show(path, root + path)
    for path in hidden:
        _mount("tmpfs", root + path, "tmpfs", _NOSUID_NODEV | _READ_ONLY, "size=4k")
    for path in devices:
        _show(path, root + path, read_only=False)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    options = f"mode=1777,size={SCRATCH_BYTES},nr_inodes=4096"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NOSUID_NODEV, options)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    _set_attributes("/", recursive=False)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    encoded = [None if value is None else os.fsencode(value) for value in (source, target, kind)]
    options = None if data is None else data.encode()
    _call("mount", *encoded, ctypes.c_ulong(flags), options)


def _show(source: str, target: str, read_only: bool = True) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, target, None, _BIND | _REC)
    if read_only:
        _set_attributes(target, recursive=True)


def _set_attributes(path: str, recursive: bool) -> None:
    attributes = struct.pack("<QQQQ", _READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    _call(
        "syscall",
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(-100),  # paths from the working directory
        os.fsencode(path),
        ctypes.c_uint(0x8000 if recursive else 0),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )


# --- Landlock ----------------------------------------------------------------------------------

_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_READ_DIRECTORY = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read file, read directory
_READ_FILE = (1 << 0) | (1 << 2)
_READ_WRITE_FILE = (1 << 1) | (1 << 2)
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many kinds of access it handles


def restrict_files(readable: list[str], devices: list[str], scratch: str) -> bool:
    """Only these paths can be read, and only the scratch written. False without Landlock."""
    abi = _libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    handled = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0  # bind and connect
    scopes = 3 if abi >= 6 else 0  # abstract sockets and signals of others
    attributes = struct.pack("<QQQ", handled, network, scopes)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call("syscall", _SYS_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    rules = [(path, _READ_DIRECTORY if os.path.isdir(path) else _READ_FILE) for path in readable]
    rules += [(path, _READ_WRITE_FILE) for path in devices]
    rules += [(scratch, handled & ~(1 << 0))]  # all but execution
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", rights & handled, descriptor)
        _call("syscall", _SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(descriptor)
    _call("syscall", _SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return True


# --- seccomp -----------------------------------------------------------------------------------

_ARCHITECTURES = {  # machine → its audit number, and the column of the tables below
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}
Numbers = dict[str, tuple[int | None, int | None]]  # name → x86-64, AArch64; None: not there
_DENIED: Numbers = {  # what neither a program nor the process that forks it needs
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # shared memory, messages and semaphores of System V: also those of others, by their numbers
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "socket": (41, 198),
    "open_by_handle_at": (304, 265),
    "syslog": (103, 116),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "execve": (59, 221),
    "execveat": (322, 281),
}
_DENIED_TO_PROGRAMS: Numbers = {
    # signals, and all that sends one or changes how this process ends
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prctl": (157, 167),
    "personality": (135, 92),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # modes, owners, times and attributes, which file rules do not cover
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "openat2": (437, 437),  # whose flags cannot be read here
    # what the whole machine waits for, or has a bounded number of
    "sync": (162, 81),
    "syncfs": (306, 267),
    "io_setup": (206, 0),
}
# One program, one task: what starts a second one says "try again" as at a limit of processes.
_TASKS: Numbers = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
}
# The same to every program, so that no score depends on them: 0.
_IDENTITY: Numbers = {
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
}
_PRLIMIT64, _CLONE, _CLONE3 = (302, 261), (56, 220), (435, 435)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_OPEN, _OPENAT, _O_WRITES, _O_TRUNC = (2, None), (257, 56), 3, 0x200
_NEW_ANY = 0x7E020080  # clone flags that make a namespace
_SET_FLAGS, _O_ASYNC = 4, 0x2000
# Of fcntl: duplicate, flags, locks. Not: signals (SETSIG, SETOWN, SETOWN_EX, NOTIFY, SETLEASE).
_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
# Of ioctl: whether it is a terminal, its size, bytes to read, whether to wait, what exec closes.
_IOCTL_ALLOWED = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38


def filter_calls() -> bool:
    """Denies calls to this process and its children. False on an unknown machine."""
    return install_filter(_filter(_first_rules))


def program_filter() -> bytes | None:
    """What a program is denied beside that, ready to be installed in its process."""
    return _filter(_program_rules)


def install_filter(program: bytes | None) -> bool:
    if program is None:
        return False
    header = struct.pack("@HP", len(program) // 8, _address(program))
    return _libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)


def _filter(rules: Callable[[int], list[bytes]]) -> bytes | None:
    """A filter's instructions: eight bytes each, jumps relative to the next one."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return None
    audit, column = _ARCHITECTURES[machine]
    code = [
        _step(_LOAD, 4),
        _step(_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, 0),
        _step(_AT_LEAST, 0x40000000, 0, 1),  # the x32 numbers
        _step(_RETURN, _KILL),
    ]
    return b"".join([*code, *rules(column), _step(_RETURN, _ALLOW)])


def _refuse(calls: Numbers, column: int, error: int) -> list[bytes]:
    numbers = [n for call in calls.values() if (n := call[column]) is not None]
    refusal = _step(_RETURN, _ERRNO | error)
    return [part for n in numbers for part in (_step(_EQUAL, n, 0, 1), refusal)]


def _first_rules(column: int) -> list[bytes]:
    return [
        *_refuse(_DENIED, column, _EPERM),
        # clone3 hides its flags in memory; the C library falls back to clone
        _step(_EQUAL, _CLONE3[column], 0, 1),
        _step(_RETURN, _ERRNO | _ENOSYS),
        # clone: no new namespaces
        _step(_EQUAL, _CLONE[column], 0, 4),
        _step(_LOAD, 16),
        _step(_ANY_BIT, _NEW_ANY, 0, 1),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_RETURN, _ALLOW),
        # prlimit64: of the caller only
        _step(_EQUAL, _PRLIMIT64[column], 0, 3),
        _step(_LOAD, 16),
        _step(_EQUAL, 0, 1, 0),
        _step(_RETURN, _ERRNO | _EPERM),
    ]


def _program_rules(column: int) -> list[bytes]:
    return [
        *_refuse(_IDENTITY, column, 0),
        *_refuse(_DENIED_TO_PROGRAMS, column, _EPERM),
        *_refuse(_TASKS, column, _EAGAIN),
        *_only(_IOCTL[column], _IOCTL_ALLOWED),
        # fcntl: flags may be set, but for the one that sends signals
        _step(_EQUAL, _FCNTL[column], 0, 6),
        _step(_LOAD, 24),
        _step(_EQUAL, _SET_FLAGS, 0, 3),
        _step(_LOAD, 32),
        _step(_ANY_BIT, _O_ASYNC, 0, 1),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_LOAD, 0),
        *_only(_FCNTL[column], _FCNTL_ALLOWED),
        *_refuse_to_empty(_OPEN[column], 24),
        *_refuse_to_empty(_OPENAT[column], 32),
    ]


def _refuse_to_empty(call: int | None, flags: int) -> list[bytes]:
    """Refuses to open for reading with O_TRUNC, which Landlock knows from Linux 6.2 on. ``flags``:
    where they stand. The number of the call stays loaded."""
    if call is None:
        return []
    return [
        _step(_EQUAL, call, 0, 5),
        _step(_LOAD, flags),
        _step(_ANY_BIT, _O_TRUNC, 0, 2),
        _step(_ANY_BIT, _O_WRITES, 1, 0),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_LOAD, 0),
    ]


def _only(call: int, allowed: tuple[int, ...]) -> list[bytes]:
    """Of a call, by its second argument, only these; the number of the call stays loaded."""
    count = len(allowed)
    return [
        _step(_EQUAL, call, 0, count + 3),
        _step(_LOAD, 24),
        *(_step(_EQUAL, value, count - i, 0) for i, value in enumerate(allowed)),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_LOAD, 0),
    ]
