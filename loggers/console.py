"""The run on the terminal: a live table, or one line a record where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from comlrl.types import LogRecord, Tree

# Column heading, metric, format: those that a record does not have are left out of its line.
COLUMNS = (
    ("tasks", "tasks_seen", "{:,.0f}"),
    ("reward", "reward_mean", "{:.2f}"),
    ("pass", "pass_rate", "{:.0%}"),
    ("tests", "test_fraction", "{:.0%}"),
    ("aux used", "aux_called_rate", "{:.0%}"),
    ("length", "completion_length_mean", "{:.0f}"),
    ("cut", "truncation_share", "{:.0%}"),
    ("tok/s", "tokens_per_second", "{:,.0f}"),
)


class ConsoleLogger:
    """``total``: the training steps that the run will make, or None where that is not known."""

    def __init__(
        self, total: int | None = None, *, title: str = "", console: Console | None = None
    ) -> None:
        self._console = console or Console()
        self._live: _LiveView | None = None
        self._total = total
        self._started = time.monotonic()
        self._first_step: int | None = None
        if self._console.is_terminal:
            self._live = _LiveView(self._console, total, title)

    def log(self, record: LogRecord) -> None:
        if self._live is not None:
            self._live.show(record)
        else:
            self._console.print(self._line(record), highlight=False, markup=False, soft_wrap=True)

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None:
        """Nothing: episodes are for files."""

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def _line(self, record: LogRecord) -> str:
        position = f"{training_step(record)}" + (f"/{self._total}" if self._total else "")
        words = [f"{record.phase:<5} {position}  env steps {record.step}  epoch {record.epoch}"]
        words += [
            f"{heading} {form.format(record.metrics[name])}"
            for heading, name, form in COLUMNS
            if name in record.metrics
        ]
        left = self._seconds_left(record)
        if left is not None:
            words.append(f"left {clock(left)}")
        return "  ".join(words)

    def _seconds_left(self, record: LogRecord) -> float | None:
        step = training_step(record)
        if self._first_step is None:
            self._first_step, self._started = step, time.monotonic()
        done = step - self._first_step
        if not self._total or done <= 0:
            return None
        return (time.monotonic() - self._started) / done * max(self._total - step, 0)


class _LiveView:
    """A progress bar over a table: the latest training step, and evaluations below it."""

    def __init__(self, console: Console, total: int | None, title: str) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID = self._progress.add_task(title or "training", total=total)
        self._train: LogRecord | None = None
        self._evals: list[LogRecord] = []
        self._live = Live(self._view(), console=console, refresh_per_second=4)
        self._live.start()

    def show(self, record: LogRecord) -> None:
        if record.phase == "train":
            self._train = record
        else:
            self._evals.append(record)
        self._progress.update(self._task, completed=training_step(record))
        self._live.update(self._view())

    def close(self) -> None:
        self._live.stop()

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False)
        shown = [r for r in (*self._evals[:1], *self._evals[1:][-4:], self._train) if r]
        columns = [c for c in COLUMNS if any(c[1] in r.metrics for r in shown)]
        for heading in ("", "step", "env steps", *(c[0] for c in columns)):
            table.add_column(heading, justify="right" if heading else "left")
        for record in shown:
            cells = [
                form.format(record.metrics[name]) if name in record.metrics else "–"
                for _, name, form in columns
            ]
            table.add_row(record.phase, str(training_step(record)), f"{record.step:,}", *cells)
        return Group(self._progress, table)


def training_step(record: LogRecord) -> int:
    """Where a run is; a training step may be several updates, and says so."""
    return int(record.metrics.get("training_step", record.update))


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
