"""Console output of a run: a live table on a terminal, else one line per record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from comlrl.loop.progress import TRAINING, Progress, clock
from comlrl.loop.records import Logger, LogRecord
from comlrl.quoting import one_line

# (heading, metric, format); columns whose metric a record lacks are left out of its line.
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
    """Return a console that writes no escape codes if NO_COLOR (no-color.org) is set."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, force_terminal=False if plain else None)


class ConsoleLogger(Logger):
    """Logger that prints a run's records and its remaining time.

    ``progress``: the run's progress and current work; ``columns``: the domain's columns.
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
        self._train: LogRecord | None = None
        self._evals: list[LogRecord] = []
        self._live: Live | None = None
        if self._console.is_terminal:
            progress.show(one_line(title) or "training")
            self._live = Live(console=self._console, get_renderable=self._view)
            self._live.start()
        else:
            progress.tell = self._tell

    def log(self, record: LogRecord) -> None:
        if self._live is None:
            self._print(self._line(record))
            return
        if record.phase == "train":
            self._train = record
        else:
            self._evals.append(record)
        self._live.refresh()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _tell(self, doing: str) -> None:
        """Print the start of work other than training, whose steps are printed already."""
        if doing != TRAINING:
            self._print("  ".join([doing, *self._left()]))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _line(self, record: LogRecord) -> str:
        where = self._progress.position(training_step(record))
        metrics = _shown(record)
        words = [f"{record.phase:<5} {where}  env steps {record.step}  epoch {record.epoch}"]
        words += [
            f"{heading} {form.format(metrics[name])}"
            for heading, name, form in self._columns
            if name in metrics
        ]
        return "  ".join([*words, *self._left()])

    def _left(self) -> list[str]:
        left = self._progress.seconds_left
        return [] if left is None else [f"left {clock(left)}"]

    def _view(self) -> Group:
        """Return progress and time over a table of the latest training step and evaluations."""
        shown = [r for r in (*self._evals[:1], *self._evals[1:][-4:], self._train) if r]
        tables = [_table(shown, self._columns)] if shown else []
        return Group(self._progress.tasks.get_renderable(), *tables)


@contextlib.contextmanager
def shown(progress: Progress, work: str) -> Iterator[None]:
    """Show the progress of a command: a live line on a terminal, elsewhere a line per minute.

    Neither is part of the command's output; the live line disappears at the end.
    """
    console = terminal(stderr=True)
    progress.begin(work)
    if not console.is_terminal:
        progress.tell = lambda doing: console.print(doing, highlight=False, markup=False)
        yield
        return
    with Live(console=console, transient=True, get_renderable=progress.tasks.get_renderable):
        yield


def _table(shown: Sequence[LogRecord], columns: Columns) -> Table:
    table = Table(box=None, pad_edge=False)
    metrics_S = [_shown(record) for record in shown]
    columns = [c for c in columns if any(c[1] in metrics for metrics in metrics_S)]
    for heading in ("", "step", "env steps", *(c[0] for c in columns)):
        table.add_column(Text(heading), justify="right" if heading else "left")
    for record, metrics in zip(shown, metrics_S, strict=True):
        cells = [
            form.format(metrics[name]) if name in metrics else "–" for _, name, form in columns
        ]
        table.add_row(record.phase, str(training_step(record)), f"{record.step:,}", *cells)
    return table


def _shown(record: LogRecord) -> Mapping[str, float]:
    """Return a record's metrics, with the task reward as the reward.

    A training step that maximizes a reward model's score shows both; evaluations always show the
    task reward.
    """
    metrics = record.metrics
    if "task_reward_mean" not in metrics:
        return metrics
    score, reward = metrics["reward_mean"], metrics["task_reward_mean"]
    return {**metrics, "reward_mean": reward, "model_score_mean": score}


def training_step(record: LogRecord) -> int:
    """Return the record's training step, which may span several updates."""
    return int(record.metrics.get("training_step", record.update))
