"""The files of this machine that are visible in the sandbox: Python and its libraries."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

_LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
_HIDDEN = ("site-packages", "dist-packages")  # folders of third-party packages


@functools.cache
def visible_paths() -> list[str]:
    """Return the paths shown read-only: the Python installation and the system's libraries."""
    base = {"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}
    base |= {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    wanted = [
        *_LIBRARIES,
        f"{sys.base_prefix}/lib",
        f"{sys.base_exec_prefix}/lib",
        f"{sys.base_exec_prefix}/lib64",
        sysconfig.get_path("stdlib", vars=base),
        sysconfig.get_path("platstdlib", vars=base),
        os.path.realpath(sys.executable),
    ]
    shown: list[str] = []
    for path in sorted({os.path.normpath(p) for p in wanted if p and os.path.exists(p)}, key=len):
        if not any(path.startswith(f"{parent}/") for parent in shown):
            shown.append(path)
    return shown


@functools.cache
def hidden_paths() -> list[str]:
    """Return the folders of third-party packages in ``visible_paths``."""
    hidden = []
    for top in visible_paths():
        for directory, names, _ in os.walk(top) if not os.path.islink(top) else ():
            for name in {*_HIDDEN} & {*names}:
                path = os.path.join(directory, name)
                names.remove(name)
                if not os.path.islink(path):
                    hidden.append(path)
    return sorted(hidden)


@functools.cache
def readable_paths() -> list[str]:
    """Return ``visible_paths`` without ``hidden_paths``.

    A folder that contains a hidden path is replaced by its other entries.
    """
    hidden = {os.path.realpath(path) for path in hidden_paths()}
    pending, readable = [os.path.realpath(path) for path in visible_paths()], []
    while pending:
        path = pending.pop()
        if any(below.startswith(f"{path}/") for below in hidden):
            pending += [e.path for e in os.scandir(path) if not e.is_symlink() or e.is_file()]
        elif path not in hidden:
            readable.append(path)
    return sorted(set(readable))
