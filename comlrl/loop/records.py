"""Log records, and the interface of loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from comlrl.types import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One line of ``metrics.jsonl``."""

    step: int  # environment steps
    update: int
    epoch: int
    phase: Literal["train", "eval"]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LogMark:
    """The end of the part of a log that a resumed run keeps: up to its checkpoint."""

    lines: int = 0  # number of lines of metrics.jsonl
    update: int = -1
    env_steps: int = -1


class Logger:
    """A base class for sinks of metrics and episodes; a run may have several. Subclasses override
    only the methods that they need."""

    def begin(self, mark: LogMark) -> None:
        """Prepare the log: remove what an earlier process logged after ``mark``."""

    def log(self, record: LogRecord) -> None:
        """Log metrics."""

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        """Log the episodes of a record."""

    def close(self) -> None:
        """Write buffered data."""
