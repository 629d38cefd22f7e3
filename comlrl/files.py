"""File utilities: atomic writes that survive a kill or a full disk, JSON lines, terminal output
and the limit on open files."""

from __future__ import annotations

import contextlib
import errno
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
    """Raise this process's limit on open files and sockets above the usual 1,024, because hundreds
    of concurrent episodes and requests need more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_OPEN if hard == unlimited else min(MAX_OPEN, hard)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a maximum below its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def replace(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new content, even after a kill."""
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    partial.unlink(missing_ok=True)  # if it is a link, do not write to its target
    try:
        with partial.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder with its content. Of a symbolic link, remove only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def put_in_place(new: Path, path: Path, old: Path) -> None:
    """Rename the folder ``new`` to ``path``; move an existing ``path`` to ``old`` and remove it."""
    remove(old)
    if path.exists() or path.is_symlink():
        path.rename(old)
    new.rename(path)
    remove(old)


class OutputStream(io.TextIOWrapper):
    """Standard output or error that discards its text once its reader is gone (``| head``, a lost
    connection, a closed terminal), so that a run goes on. It escapes characters that its encoding
    lacks."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # which would close the buffer

    def write(self, text: str) -> int:
        with self._discarding():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            super().flush()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


def tolerant_terminal() -> None:
    """Let standard output and error escape characters that their encoding lacks, and outlive their
    reader, so that no run fails in a locale, at a file name that is not UTF-8, or with its
    terminal. Raises SystemExit if the working directory was deleted, as relative paths would be
    invalid."""
    try:
        os.getcwd()
    except OSError:
        print_error("the working directory was deleted; change to one that exists")
        raise SystemExit(UserError.exit_code) from None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, OutputStream(stream))


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSONL file in order, without an incomplete last line.

    Raises ValueError, naming file and line, if another line is not JSON.
    """
    text = Path(path).read_text(encoding="utf-8")
    complete, _, _torn = text.rpartition("\n")
    for number, line in enumerate(complete.split("\n") if complete else [], start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def read_entry(path: Path, key: str) -> str | None:
    """Return a text of the object in a JSON file, or None if it is missing or unreadable."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def keep(path: str | Path, wanted: Callable[[int, dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the lines that ``wanted(index, line)`` accepts, atomically.

    An incomplete last line is removed, and so is a file that becomes empty. A missing file is
    ignored. Raises UserError if the file is damaged.
    """
    if Path(path).exists():
        try:
            lines = [line for index, line in enumerate(read_lines(path)) if wanted(index, line)]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"'{path}' is damaged ({error}); repair or remove it") from error
        replace(path, "".join(json.dumps(line) + "\n" for line in lines))
        if not lines:
            Path(path).unlink()
