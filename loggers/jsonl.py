"""``metrics.jsonl``: one line per record, flushed immediately."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from comlrl import files
from comlrl.loop.records import Logger, LogMark, LogRecord


class JsonlLogger(Logger):
    """Logger of ``{"step", "update", "epoch", "phase", "metrics"}`` lines, each flushed."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def begin(self, mark: LogMark) -> None:
        if mark.lines:
            files.keep(self._path, lambda index, _: index < mark.lines)
        self._file = self._path.open("a" if mark.lines else "w", encoding="utf-8")

    def log(self, record: LogRecord) -> None:
        line = {
            "step": record.step,
            "update": record.update,
            "epoch": record.epoch,
            "phase": record.phase,
            "metrics": {name: number(value) for name, value in record.metrics.items()},
        }
        assert self._file is not None, "begin comes first"
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def number(value: Any) -> float | int | None:
    """Return a metric as a JSON value; None (null) if it is not finite."""
    plain = value.item() if hasattr(value, "item") else value
    return plain if math.isfinite(plain) else None
