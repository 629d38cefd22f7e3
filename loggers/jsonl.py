"""``metrics.jsonl``: one line a record, on disk as soon as it is written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from comlrl.types import LogRecord, Tree


class JsonlLogger:
    """Appends ``{"step", "update", "epoch", "phase", "metrics"}`` lines; flushes each."""

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        """Start an empty file, or continue one (``resume``)."""
        self._path = Path(path)
        self._file = open_text(self._path, append=resume)

    def log(self, record: LogRecord) -> None:
        line = {
            "step": record.step,
            "update": record.update,
            "epoch": record.epoch,
            "phase": record.phase,
            "metrics": {name: number(value) for name, value in record.metrics.items()},
        }
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None:
        """Nothing: episodes have files of their own."""

    def truncate_after(self, update: int) -> None:
        """Drop lines past ``update``, and a line torn by a kill: a resumed run writes them anew."""
        self._file.close()
        truncate(self._path, lambda line: line["update"] <= update)
        self._file = open_text(self._path, append=True)

    def close(self) -> None:
        self._file.close()


def number(value: Any) -> float | int | None:
    """A metric as JSON has it; what is not finite is null, for JSON has no name for it."""
    plain = value.item() if hasattr(value, "item") else value
    return plain if math.isfinite(plain) else None


def open_text(path: str | Path, *, append: bool) -> TextIO:
    return open(path, "a" if append else "w", encoding="utf-8")


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file in order; a torn last line is left out.

    Raises ValueError, naming file and line, where another line is not JSON.
    """
    text = Path(path).read_text(encoding="utf-8")
    whole, _, _torn = text.rpartition("\n")
    for number_, line in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number_}: not JSON ({error})") from error


def truncate(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with the lines that ``keep`` accepts, in one atomic step."""
    lines = [json.dumps(line) + "\n" for line in read_lines(path) if keep(line)]
    replace(path, "".join(lines))


def replace(path: str | Path, text: str) -> None:
    """Write a file so that a reader, or a kill, sees the old one or the new one."""
    partial = Path(f"{path}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
