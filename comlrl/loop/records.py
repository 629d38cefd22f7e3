"""Log records, and the interface of loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


class Logger(Protocol):
    """A sink of metrics and episodes; a run may have several."""

    def begin(self, mark: LogMark) -> None:
        """Prepare the log before anything is logged: drop what an earlier process has logged
        after ``mark``."""

    def log(self, record: LogRecord) -> None: ...

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None: ...

    def close(self) -> None: ...
