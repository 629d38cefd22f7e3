"""One run a folder: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from comlrl.errors import UserError

FILE = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems
TRIES, PAUSE = 5, 0.1  # whoever asks for ``holder`` has the lock for a moment


def holder(folder: Path) -> str | None:
    """Who runs in a folder: ``process 123 on host``; None: nobody."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # no such file, or not ours: then no run of ours can be in it either
        return None
    try:
        if _lock(descriptor):
            return None
        return os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
    finally:
        os.close(descriptor)


def refuse_in_use(folder: Path) -> None:
    """Raises UserError where a run is at work in ``folder``."""
    if (who := holder(folder)) is not None:
        raise _in_use(folder, who)


def _in_use(folder: Path, who: str) -> UserError:
    return UserError(
        f"output.dir: '{folder}' is in use by {who}; let that end first, or give another folder"
    )


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """The lock of a folder, which exists. Raises UserError where another process has it."""
    path = folder / FILE
    for _ in range(TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise UserError(
                f"output.dir: '{path}' cannot be written ({error.strerror}); give another folder"
            ) from error
        if _lock(descriptor) and _is(path, descriptor):
            break
        os.close(descriptor)  # another's; or the file of one that has just ended and removed it
        time.sleep(PAUSE)
    else:
        raise _in_use(folder, holder(folder) or "another run")
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if _is(path, descriptor):  # the folder may have been moved aside
            path.unlink()
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether it could be had; always where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one of that name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False
