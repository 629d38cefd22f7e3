"""Files that a kill or a full disk leaves whole: atomic writes, and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def replace(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a kill, sees the old one or the new one."""
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    os.replace(partial, path)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file in order; a torn last line is left out.

    Raises ValueError, naming file and line, where another line is not JSON.
    """
    text = Path(path).read_text(encoding="utf-8")
    whole, _, _torn = text.rpartition("\n")
    for number, line in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def keep(path: str | Path, wanted: Callable[[int, dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the lines that ``wanted(index, line)`` accepts, in one atomic
    step; a torn last line goes, and a file without lines. Nothing where there is no such file."""
    if Path(path).exists():
        kept = [line for index, line in enumerate(read_lines(path)) if wanted(index, line)]
        replace(path, "".join(json.dumps(line) + "\n" for line in kept))
        if not kept:
            Path(path).unlink()
