"""Files that a kill or a full disk leaves whole: atomic writes, JSON lines; the terminal, and how
many files may be open."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from comlrl.errors import UserError, print_error

MAX_OPEN = 16_384  # files and sockets, where the system's hard limit allows it


def raise_open_limit() -> None:
    """Allow this process more open files and sockets than the usual 1,024, which hundreds of
    episodes and requests need at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_OPEN if hard == unlimited else min(MAX_OPEN, hard)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a maximum below its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def replace(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader, a kill or a full disk leaves the old one or the new one."""
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    partial.unlink(missing_ok=True)  # a link would be written through
    try:
        with partial.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def put_in_place(new: Path, path: Path, old: Path) -> None:
    """Rename the folder ``new`` to ``path``; what is there is removed, by way of ``old``."""
    remove(old)
    if path.exists() or path.is_symlink():
        path.rename(old)
    new.rename(path)
    remove(old)


def tolerant_terminal() -> None:
    """Let stdout write what its encoding does not have as escapes: a locale that is not UTF-8, or
    a file's name that is not, ends no run. Raises SystemExit where the working directory is gone:
    every path of a command needs one."""
    try:
        os.getcwd()
    except OSError:
        print_error("the working directory was deleted; change to one that exists")
        raise SystemExit(UserError.exit_code) from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSONL file in order; a torn last line is left out.

    Raises ValueError, naming file and line, if another line is not JSON.
    """
    text = Path(path).read_text(encoding="utf-8")
    complete, _, _torn = text.rpartition("\n")
    for number, line in enumerate(complete.split("\n") if complete else [], start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def keep(path: str | Path, wanted: Callable[[int, dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the lines that ``wanted(index, line)`` accepts, atomically.

    A torn last line is removed, and a file without lines. A missing file is ignored.
    """
    if Path(path).exists():
        lines = [line for index, line in enumerate(read_lines(path)) if wanted(index, line)]
        replace(path, "".join(json.dumps(line) + "\n" for line in lines))
        if not lines:
            Path(path).unlink()
