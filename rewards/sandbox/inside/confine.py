"""Confinement of the sandboxed process by direct system calls. Standard library only.

Three layers, each used if the kernel supports it: namespaces (``enter_namespaces``, or bubblewrap
if installed), Landlock rules on files, and a seccomp filter on system calls (``seccomp.py``).
Resource limits and an unprivileged user apply everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Iterator

SCRATCH_BYTES = 16 << 20  # of files in the scratch directory
SCRATCH_FILES = 4096  # files in the scratch directory, with namespaces
FILE_BYTES = 8 << 20  # of one file
RANDOM_DEVICES = ("/dev/random", "/dev/urandom")
RANDOM_BYTES = 1 << 16  # in the file that replaces each
MAX_FILES = 64  # open at a time
MAX_TIMERS = 64  # POSIX timers; the kernel reserves a signal for each
_RLIMIT_SIGPENDING = 11  # not in ``resource``

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> int:
    result = getattr(_libc, function)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


# --- identity and resources --------------------------------------------------------------------

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
FIRST_UID = 1_900_000_000  # above any account; each sandbox uses a different one
_NOBODY = 65534
_CAP_DAC_READ_SEARCH = 1 << 2


def die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def refuse_privileges() -> None:
    """Prevent programs from gaining privileges, which Landlock and seccomp require."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent has ended."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def drop_identity(slot: int, keep_reading: bool) -> bool:
    """Switch from root to a user that owns nothing; return whether its id is unique.

    ``keep_reading`` keeps the right to read any file, for a Python installation that only root
    can read; Landlock rules must already be in force.
    """
    unique = False
    keep_reading = keep_reading and os.getuid() == 0
    if os.getuid() == 0:
        _call("prctl", _PR_SET_KEEPCAPS, int(keep_reading), 0, 0, 0)
        unique = _become(FIRST_UID + slot)
        if not unique:
            _become(_NOBODY)
    rights = _CAP_DAC_READ_SEARCH if keep_reading else 0
    capabilities = struct.pack("<6I", rights, rights, 0, 0, 0, 0)
    _call("capset", struct.pack("<Ii", 0x20080522, 0), capabilities)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace, no /proc/PID/mem
    die_with_parent()  # changing the user clears this setting
    return unique


def give_away(directory: str, slot: int) -> None:
    """Make the user that root is about to become the owner of the scratch."""
    try:
        os.chown(directory, FIRST_UID + slot, FIRST_UID + slot)
    except OSError:
        os.chown(directory, _NOBODY, _NOBODY)


def _become(uid: int) -> bool:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # the container does not map this id
        return False
    return True


def limit_resources(memory_mb: int) -> None:
    """Set hard limits on address space, files and core dumps, which every child inherits."""
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
    """Limit this process's CPU time and forbid new processes and threads."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


# --- addresses ---------------------------------------------------------------------------------

_ADDR_NO_RANDOMIZE, _ASK = 0x0040000, 0xFFFFFFFF


@contextlib.contextmanager
def fixed_addresses() -> Iterator[None]:
    """Disable address randomization for programs started in this context, if possible."""
    before = _libc.personality(_ASK)
    if before >= 0:
        _libc.personality(before | _ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        if before >= 0:
            _libc.personality(before)


def has_fixed_addresses() -> bool:
    """Return whether this process was started without randomized addresses."""
    persona = _libc.personality(_ASK)
    return persona >= 0 and bool(persona & _ADDR_NO_RANDOMIZE)


_AT_RANDOM = 25


def forget_random_bytes() -> None:
    """Clear the 16 random bytes that the kernel passes to each new process."""
    _libc.getauxval.restype = ctypes.c_void_p
    if address := _libc.getauxval(ctypes.c_ulong(_AT_RANDOM)):
        ctypes.memset(address, 0, 16)


# --- namespaces, where bubblewrap is not installed ---------------------------------------------

_NEW_USER, _NEW_NS, _NEW_PID, _NEW_NET = 0x10000000, 0x00020000, 0x20000000, 0x40000000
_NEW_IPC, _NEW_UTS = 0x08000000, 0x04000000
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_READ_ONLY, _NOSUID_NODEV = 1, 2 | 4
_SYS_MOUNT_SETATTR = 442
_READ_ONLY_NOSUID_NODEV = 1 | 2 | 4  # mount attributes


def write_random_bytes(path: str) -> None:
    """Write a file of fixed bytes to show as ``/dev/urandom``, so that seeds are repeatable."""
    import random  # only after ``candidate`` has disabled its reseeding in forks

    with open(path, "wb") as file:
        file.write(random.Random(0).randbytes(RANDOM_BYTES))
    os.chmod(path, 0o444)


def enter_namespaces(root: str, visible: list[str], hidden: list[str], devices: list[str]) -> None:
    """Enter new user (if not root), mount, network, IPC and host-name namespaces; PID for children.

    Afterwards ``/`` is read-only and contains ``visible``, in which ``hidden`` are empty,
    ``devices`` and files for ``RANDOM_DEVICES``; ``/tmp`` is an empty scratch directory. ``root``
    is an empty directory to mount on. Raises OSError if the kernel refuses.
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
    for path in RANDOM_DEVICES:
        write_random_bytes(root + path)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    _mount_scratch(f"{root}/tmp")
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    _set_attributes("/", recursive=False)


def _mount_scratch(path: str) -> None:
    options = f"mode=1777,size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES}"
    _mount("tmpfs", path, "tmpfs", _NOSUID_NODEV, options)


def mount_over(path: str) -> None:
    """Mount a scratch over bubblewrap's, which does not limit the number of files, if allowed."""
    with contextlib.suppress(PermissionError):  # ``counts_files`` reports it
        _mount_scratch(path)


def counts_files(scratch: str) -> bool:
    """Return whether the number of files in the scratch is bounded."""
    return 0 < os.statvfs(scratch).f_files <= SCRATCH_FILES


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
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI version → number of access rights


def restrict_files(readable: list[str], devices: list[str], scratch: str) -> bool:
    """Restrict file access to these paths. Return False if the kernel lacks Landlock."""
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
