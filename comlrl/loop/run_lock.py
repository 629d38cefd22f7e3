"""A lock that limits a folder to one run or sweep; it is released when the holding process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from comlrl.errors import UserError

FILE = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)  # file systems that do not support locks


def holder(folder: Path) -> str | None:
    """Return the process that uses a folder, as ``process 123 on host``, or None."""
    path = folder / FILE
    if path.is_symlink() or not path.is_file():
        return None
    try:
        with FileLock(path, blocking=False):
            return None
    except Timeout:
        return _text(path)
    except OSError:  # not accessible to this user, so no run of this user can be in it
        return None


def refuse_in_use(folder: Path) -> None:
    """Raise UserError if a run is active in ``folder``."""
    if (who := holder(folder)) is not None:
        raise _in_use(folder, who)


@contextlib.contextmanager
def hold(folder: Path, setting: str = "output.dir") -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing. Raises UserError, naming the
    ``setting`` that chose the folder, if another process holds the lock."""
    path = folder / FILE
    lock = FileLock(path, mode=0o644)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0.5)  # ``holder`` may hold it for a moment
    except Timeout:
        raise _in_use(folder, _text(path), setting) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(
                f"{setting}: '{path}' cannot be written ({error.strerror}); choose another folder"
            ) from error
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        locked = path.stat()
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), locked):  # the folder may have been moved aside
                path.unlink()
        lock.release()


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[:200].strip() or "another process"
    return "another process"


def _in_use(folder: Path, who: str, setting: str = "output.dir") -> UserError:
    return UserError(
        f"{setting}: '{folder}' is in use by {who}; wait until that ends, or choose another folder"
    )
