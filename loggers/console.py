"""The run on the terminal: a live table, or one line a record where there is no terminal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comlrl.loop.records import LogMark, LogRecord
from comlrl.quoting import one_line
from comlrl.types import RolloutResult

if TYPE_CHECKING:
    from comlrl.loop.progress import Progress

# Column heading, metric, format: those that a record does not have are left out of its line.
Columns = Sequence[tuple[str, str, str]]
BEFORE: Columns = (
    ("tasks", "tasks_seen", "{:,.0f}"),
    ("reward", "reward_mean", "{:.2f}"),
    ("score", "model_score_mean", "{:.2f}"),
    ("pass", "pass_rate", "{:.0%}"),
)
AFTER: Columns = (
    ("length", "completion_length_mean", "{:.0f}"),
    ("cut", "truncation_share", "{:.0%}"),
    ("tok/s", "tokens_per_second", "{:,.0f}"),
)


def terminal(*, stderr: bool = False) -> Console:
    """Return a console that writes no escape codes where NO_COLOR (no-color.org) is set."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, force_terminal=False if plain else None)


class ConsoleLogger:
    """Print a run's records, and how long it will still take.

    ``progress``: how far the run is and what it is doing; ``columns``: those of the domain.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        title: str = "",
        console: Console | None = None,
        columns: Columns = (),
    ) -> None:
        self._console = console or terminal()
        self._progress = progress
        self._columns = (*BEFORE, *columns, *AFTER)
        self._live: _LiveView | None = None
        if self._console.is_terminal:
            self._live = _LiveView(self._console, progress, title, self._columns)
        else:
            progress.listeners.append(self._began)
            progress.minutely.append(lambda doing: self._print("  ".join([doing, *self._left()])))

    def begin(self, mark: LogMark) -> None:
        """Do nothing: printed lines stay printed."""

    def log(self, record: LogRecord) -> None:
        if self._live is not None:
            self._live.show(record)
        else:
            self._print(self._line(record))

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        """Do nothing: episodes are for files."""

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def _began(self, work: str) -> None:
        """Print the start of work other than training, which prints each of its steps."""
        if work != "training":
            self._print("  ".join([work, *self._left()]))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, record: LogRecord) -> str:
        where = position(training_step(record), self._progress)
        metrics = _shown(record)
        words = [f"{record.phase:<5} {where}  env steps {record.step}  epoch {record.epoch}"]
        words += [
            f"{heading} {form.format(metrics[name])}"
            for heading, name, form in self._columns
            if name in metrics
        ]
        return "  ".join([*words, *self._left()])

    def _left(self) -> list[str]:
        left = self._progress.seconds_left()
        return [] if left is None else [f"left {clock(left)}"]


@contextlib.contextmanager
def shown(progress: Progress, work: str) -> Iterator[None]:
    """Show a command's only work: a live line on a terminal, elsewhere a line per minute.

    Both appear beside the command's output; the live line disappears at the end.
    """
    console = terminal(stderr=True)
    progress.begin(work)
    if not console.is_terminal:
        progress.minutely.append(lambda doing: console.print(doing, highlight=False, markup=False))
        yield
        return
    with Live(
        console=console, transient=True, get_renderable=lambda: Text(progress.doing, no_wrap=True)
    ):
        yield


class _LiveView:
    """Progress and time over a table of the latest training step and evaluations.

    The first line is drawn anew four times a second: the time left runs down also within a step.
    """

    def __init__(self, console: Console, progress: Progress, title: str, columns: Columns) -> None:
        self._progress, self._title = progress, one_line(title) or "training"
        self._columns = columns
        self._train: LogRecord | None = None
        self._evals: list[LogRecord] = []
        self._closed = False
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._view)
        self._live.start()

    def show(self, record: LogRecord) -> None:
        if record.phase == "train":
            self._train = record
        else:
            self._evals.append(record)
        self._live.refresh()

    def close(self) -> None:
        self._closed = True
        self._live.stop()

    def _view(self) -> Group:
        shown = [r for r in (*self._evals[:1], *self._evals[1:][-4:], self._train) if r]
        return Group(self._head(), *([_table(shown, self._columns)] if shown else []))

    def _head(self) -> Table:
        remaining = self._progress.remaining
        left = None if self._closed else self._progress.seconds_left()
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(self._title, style="bold", overflow="ellipsis", no_wrap=True),
            ProgressBar(total=remaining.total, completed=remaining.steps, width=30),
            Text(position(remaining.steps, self._progress), no_wrap=True),
            Text(clock(self._progress.elapsed), style="yellow", no_wrap=True),
            Text("" if left is None else f"left {clock(left)}", style="cyan", no_wrap=True),
            Text("" if self._closed else self._progress.doing, no_wrap=True),
        )
        return line


def _table(shown: Sequence[LogRecord], columns: Columns) -> Table:
    table = Table(box=None, pad_edge=False)
    metrics_S = [_shown(record) for record in shown]
    columns = [c for c in columns if any(c[1] in metrics for metrics in metrics_S)]
    for heading in ("", "step", "env steps", *(c[0] for c in columns)):
        table.add_column(heading, justify="right" if heading else "left")
    for record, metrics in zip(shown, metrics_S, strict=True):
        cells = [
            form.format(metrics[name]) if name in metrics else "–" for _, name, form in columns
        ]
        table.add_row(record.phase, str(training_step(record)), f"{record.step:,}", *cells)
    return table


def _shown(record: LogRecord) -> Mapping[str, float]:
    """Return a record's metrics, with the task's reward as the reward.

    A training step that maximizes a reward model's score has that score beside it; evaluations
    always show the task's reward.
    """
    metrics = record.metrics
    if "task_reward_mean" not in metrics:
        return metrics
    score, reward = metrics["reward_mean"], metrics["task_reward_mean"]
    return {**metrics, "reward_mean": reward, "model_score_mean": score}


def position(step: int, progress: Progress) -> str:
    """Return ``3/10``, ``3/~10`` if environment steps end the run, or ``3`` if no end is known."""
    remaining = progress.remaining
    if remaining.total is None:
        return str(step)
    return f"{step}/{'~' if remaining.estimated else ''}{remaining.total}"


def training_step(record: LogRecord) -> int:
    """Return the record's training step, which may span several updates."""
    return int(record.metrics.get("training_step", record.update))


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss, after days if any."""
    return str(timedelta(seconds=round(seconds)))
