"""Folders for the sandboxes' temporary files, and removal of those that killed runs left behind.

A folder in use contains a locked file. The kernel releases the lock when the last process that has
the file open ends, for any reason. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile

PREFIX = "comlrl-sandbox-"
_LOCK = "lock"


def claim() -> tuple[str, int]:
    """Create a folder; return it and its lock's descriptor, to be kept open while it is in use."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        path = os.path.join(folder, _LOCK)
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # swept by another run
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            os.chmod(folder, 0o711)  # the sandbox's user must traverse it
            return folder, lock
        os.close(lock)


def sweep() -> None:
    """Remove this user's folders that are empty, or that no process uses any more."""
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [entry for entry in entries if entry.name.startswith(PREFIX)]
    for entry in folders:
        try:
            is_mine = entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if is_mine and entry.is_dir(follow_symlinks=False):
                _sweep(entry.path)
        except FileNotFoundError:
            continue  # swept by another run


def _sweep(folder: str) -> None:
    try:
        os.rmdir(folder)
        return
    except FileNotFoundError:
        raise
    except OSError:
        pass  # not empty
    try:
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # not made by ``claim``
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(folder)
    except BlockingIOError:
        pass  # in use
    finally:
        os.close(lock)


def remove_tree(directory: str) -> None:
    """Remove a scratch directory of any depth and with any permissions."""
    path = f"{os.environ.get('PATH', '')}:{os.defpath}".strip(":")  # the user's may be empty
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        line = [*command, "--", directory]
        subprocess.run(line, check=False, stderr=subprocess.DEVNULL, env={"PATH": path}, cwd="/")
