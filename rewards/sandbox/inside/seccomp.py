"""The sandbox's seccomp filters: which system calls they refuse. Standard library only."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

_PR_SET_SECCOMP = 22
_ARCHITECTURES = {  # machine → audit number, and column of the tables below
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}
Numbers = dict[str, tuple[int | None, int | None]]  # name → number on x86-64, on AArch64
_DENIED: Numbers = {  # calls that neither programs nor the process that forks them need
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
    # System V shared memory, messages and semaphores: numbers reach those of other processes
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
    # signals, and calls that send one or change how this process ends
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
    "openat2": (437, 437),  # its flags are in memory, which a filter cannot read
    # calls that stall the whole machine or use up a limited resource of it
    "sync": (162, 81),
    "syncfs": (306, 267),
    "io_setup": (206, 0),
    # other processes' sockets: a path or abstract name may belong to a service outside
    "connect": (42, 203),
    "bind": (49, 200),
    "sendmsg": (46, 211),  # its address is in memory, which a filter cannot read
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),  # SO_PASSCRED adds the sender's process number to messages
    # results that differ from run to run: the kernel's random bytes, this sandbox's user
    "getrandom": (318, 278),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    # locks and wake-ups on shared files, which processes of other sandboxes would notice
    "flock": (73, 32),
    "futex_waitv": (449, 449),
    "futex_wake": (454, 454),
    "futex_wait": (455, 455),
    "futex_requeue": (456, 456),
}
# A program is a single task: starting another fails with EAGAIN, as at the process limit.
_TASKS: Numbers = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
}
# These return 0 in every program, so that no score depends on them.
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
_FCNTL, _IOCTL, _FUTEX = (72, 25), (16, 29), (202, 98)
_FUTEX_PRIVATE = 128
_SOCKETPAIR, _SENDTO, _GETSOCKOPT = (53, 199), (44, 206), (55, 209)
_AF_UNIX = _SOL_SOCKET = 1
# Types of socket pairs: connected streams, which asyncio uses, with or without SOCK_NONBLOCK and
# SOCK_CLOEXEC. Datagrams could be sent to an address.
_PAIRS_ALLOWED = (1, 0x801, 0x80001, 0x80801)
# Readable socket options: type, error, buffer sizes, whether it listens, protocol and domain, but
# not the owner of the other end (SO_PEERCRED and similar ones).
_OPTIONS_ALLOWED = (3, 4, 7, 8, 30, 38, 39)
_OPEN, _OPENAT, _O_WRITES, _O_TRUNC = (2, None), (257, 56), 3, 0x200
_NEW_ANY = 0x7E020080  # clone flags that make a namespace
_SET_FLAGS, _O_ASYNC = 4, 0x2000
# fcntl commands: duplicate and flags, but neither locks, which programs in other sandboxes would
# notice, nor signals (SETSIG, SETOWN, SETOWN_EX, NOTIFY, SETLEASE).
_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030)
# ioctl requests: is it a terminal, its size, bytes to read, blocking mode, close on exec.
_IOCTL_ALLOWED = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_FIRST, _SECOND, _THIRD = 16, 24, 32  # offsets of a call's arguments
_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38


def filter_calls() -> bool:
    """Deny calls to this process and its children; return False if no filter could be installed."""
    return install_filter(_filter(_first_rules))


def program_filter() -> bytes | None:
    """Return the filter that denies programs further calls, or None on an unknown machine."""
    return _filter(_program_rules)


def install_filter(program: bytes | None) -> bool:
    if program is None:
        return False
    header = struct.pack("@HP", len(program) // 8, _address(program))
    return ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)


def _filter(rules: Callable[[int], list[bytes]]) -> bytes | None:
    """Return a filter's instructions: eight bytes each, with jumps relative to the next one."""
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
        # prlimit64: only for the calling process
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
        *_only(_SOCKETPAIR[column], (_AF_UNIX,), _FIRST),
        *_only(_SOCKETPAIR[column], _PAIRS_ALLOWED),
        *_only(_GETSOCKOPT[column], (_SOL_SOCKET,)),
        *_only(_GETSOCKOPT[column], _OPTIONS_ALLOWED, _THIRD),
        # sendto: only without an address, which is a pointer, read in two halves
        _step(_EQUAL, _SENDTO[column], 0, 6),
        _step(_LOAD, 48),
        _step(_EQUAL, 0, 0, 2),
        _step(_LOAD, 52),
        _step(_EQUAL, 0, 1, 0),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_LOAD, 0),
        # futex: only private ones; one in a file's page could wake a process of another sandbox
        _step(_EQUAL, _FUTEX[column], 0, 4),
        _step(_LOAD, 24),
        _step(_ANY_BIT, _FUTEX_PRIVATE, 1, 0),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_LOAD, 0),
        # fcntl: flags may be set, except O_ASYNC, which sends signals
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
    """Refuse to open for reading with O_TRUNC, which Landlock only handles since Linux 6.2.

    ``flags``: the position of the flags. The call number stays loaded.
    """
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


def _only(call: int, allowed: tuple[int, ...], argument: int = _SECOND) -> list[bytes]:
    """Allow a call only with these values of an argument; the call number stays loaded."""
    count = len(allowed)
    return [
        _step(_EQUAL, call, 0, count + 3),
        _step(_LOAD, argument),
        *(_step(_EQUAL, value, count - i, 0) for i, value in enumerate(allowed)),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_LOAD, 0),
    ]
