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
    """The end of a log's part that belongs to the checkpoint that the run continues from."""

    lines: int = 0  # of metrics.jsonl
    update: int = -1
    env_steps: int = -1


class Logger:
    """A sink of metrics and episodes; a run may have several. A logger overrides what it needs."""

    def begin(self, mark: LogMark) -> None:
        """Prepare the log before anything is logged: drop what an earlier process has logged
        after ``mark``."""

    def log(self, record: LogRecord) -> None:
        """Log metrics."""

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        """Log the episodes that a record is about."""

    def close(self) -> None:
        """Write what is not written yet."""
