"""Progress of a run: what it is doing, how far it is and how long it will take, by rich."""

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
    """Two of rich's tasks: the run, and its present work.

    ``tell``: called with each work that begins, and once a minute with ``doing``, if the work says
    how much of it is done.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        columns = (*Tasks.get_default_columns(), TimeElapsedColumn())
        self.tasks = Tasks(*columns, get_time=clock, speed_estimate_period=math.inf)
        run, work = (self.tasks.add_task("", total=1.0, visible=False) for _ in range(2))
        self._run, self._work = run, work
        self.title, self.tell = "", lambda doing: None
        self.total: int | None = None  # training steps; None: their number is not known
        self.reach(0, None, 0.0)
        self._reported = clock()

    def reach(self, step: int, total: int | None, share: float) -> None:
        """Set the training steps that are done, those of the whole run, and the part of the run
        that is done, in [0, 1]."""
        self.total = total
        text = escape(f"{self.title} {self.position(step)}")
        self.tasks.update(self._run, description=text, completed=share)

    def position(self, step: int) -> str:
        """Return ``3/10``, or ``3`` if the number of steps is not known."""
        return str(step) if self.total is None else f"{step}/{self.total}"

    def show(self, title: str) -> None:
        """Show the run, not only its work, under a title."""
        self.title = title
        self.tasks.update(self._run, visible=True, description=escape(title))

    def begin(self, work: str) -> None:
        """Begin a piece of work."""
        self.tasks.reset(self._work, total=1.0, visible=work != TRAINING, description=work)
        self._reported = self._clock()
        self.tell(work)

    def part(self, share: float) -> None:
        """Set the part of the present work that is done, in [0, 1]."""
        self.tasks.update(self._work, completed=share)
        if self._clock() - self._reported >= MINUTE:
            self._reported = self._clock()
            self.tell(self.doing)

    def end(self) -> None:
        """End the present work."""
        self.tasks.reset(self._work, visible=False, description="")

    @property
    def work(self) -> str:
        """Return the present work; empty between two pieces."""
        return self.tasks.tasks[self._work].description

    @property
    def doing(self) -> str:
        """Return the present work, how much of it is done and how long the rest will take."""
        work = self.tasks.tasks[self._work]
        if not work.completed:
            return work.description
        left = "" if work.time_remaining is None else f", {clock(work.time_remaining)} to go"
        return f"{work.description} {work.percentage:.0f}%{left}"

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left at the pace so far; None before the second training step."""
        return self.tasks.tasks[self._run].time_remaining


class Written:
    """Completions, as they grow, as the share of the present work that they are.

    ``total``: how many there may be; where fewer will do, the work ends early.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.count = progress, total, 0.0

    def __call__(self, completions: float) -> None:
        self.count += completions
        self.progress.part(min(self.count / self.total, 1.0))


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss, after days if any."""
    return str(timedelta(seconds=round(seconds)))
