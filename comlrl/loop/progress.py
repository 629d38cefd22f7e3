"""Progress of a run with rich: its current work, how much is done and the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

from rich.markup import escape
from rich.progress import Progress as Tasks
from rich.progress import TimeElapsedColumn

TRAINING, EVALUATING, SAVING = "training", "evaluating", "saving"
MINUTE = 60.0


class Progress:
    """Two progress bars of rich: the run, and its current work.

    ``tell`` is called with each work that begins and, if the work reports progress, once a minute
    with ``doing``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        columns = (*Tasks.get_default_columns(), TimeElapsedColumn())
        self.tasks = Tasks(*columns, get_time=clock, speed_estimate_period=math.inf)
        run, work = (self.tasks.add_task("", total=1.0, visible=False) for _ in range(2))
        self._run, self._work = run, work
        self.title, self.tell = "", lambda doing: None
        self.total: int | None = None  # training steps; None: unknown
        self.reach(0, None, 0.0)
        self._reported = clock()

    def reach(self, step: int, total: int | None, share: float) -> None:
        """Set the number of finished training steps, that of the whole run (None: unknown), and
        the fraction of the run that is done, in [0, 1]."""
        self.total = total
        text = escape(f"{self.title} {self.position(step)}")
        self.tasks.update(self._run, description=text, completed=share)

    def position(self, step: int) -> str:
        """Return ``3/10``, or ``3`` if the total is unknown."""
        return str(step) if self.total is None else f"{step}/{self.total}"

    def show(self, title: str) -> None:
        """Show the run's bar too, with a title."""
        self.title = title
        self.tasks.update(self._run, visible=True, description=escape(title))

    def begin(self, work: str) -> None:
        """Begin a piece of work."""
        self.tasks.reset(self._work, total=1.0, visible=work != TRAINING, description=work)
        self._reported = self._clock()
        self.tell(work)

    def part(self, share: float) -> None:
        """Set the fraction of the current work that is done, in [0, 1]."""
        self.tasks.update(self._work, completed=share)
        if self._clock() - self._reported >= MINUTE:
            self._reported = self._clock()
            self.tell(self.doing)

    def end(self) -> None:
        """End the current work."""
        self.tasks.reset(self._work, visible=False, description="")

    @property
    def work(self) -> str:
        """Return the current work; empty if there is none."""
        return self.tasks.tasks[self._work].description

    @property
    def doing(self) -> str:
        """Return the current work, how much of it is done and the time left."""
        work = self.tasks.tasks[self._work]
        if not work.completed:
            return work.description
        left = "" if work.time_remaining is None else f", {clock(work.time_remaining)} to go"
        return f"{work.description} {work.percentage:.0f}%{left}"

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left at the average pace; None before the second training step."""
        return self.tasks.tasks[self._run].time_remaining


class Written:
    """Reports sampled completions as progress of the current work.

    ``total``: the most completions; the work may end with fewer.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.count = progress, total, 0.0

    def __call__(self, completions: float) -> None:
        self.count += completions
        self.progress.part(min(self.count / self.total, 1.0))


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss, preceded by days if any."""
    return str(timedelta(seconds=round(seconds)))
