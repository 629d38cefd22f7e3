"""Folders for the sandboxes' temporary files, and what killed runs have left of them.

A folder that is in use holds a file that is locked; the kernel releases the lock with the last
process that has it open, however that ends. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile

PREFIX = "comlrl-sandbox-"
_LOCK = "lock"


def claim() -> tuple[str, int]:
    """Create a folder; return it and its lock's descriptor, which is open while it is in use."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        path = os.path.join(folder, _LOCK)
        try:
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another run's sweep was faster
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            os.chmod(folder, 0o711)  # the sandbox's own user goes through it
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
            continue  # another run's sweep was faster


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
    """Remove a scratch directory, however deep and whatever its modes."""
    path = f"{os.environ.get('PATH', '')}:{os.defpath}".strip(":")  # a user's may be empty
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        line = [*command, "--", directory]
        subprocess.run(line, check=False, stderr=subprocess.DEVNULL, env={"PATH": path}, cwd="/")
