"""The present work of a run, and an estimate of the remaining time."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

TRAINING, EVALUATING, SAVING = "training", "evaluating", "saving"
MINUTE = 60.0
LITTLE = 0.05  # of a work; the pace so far says nothing: prompts are read before the first token
RECENT = 20  # durations of each work that the estimate rests on


@dataclass(frozen=True, slots=True)
class Remaining:
    """A run's progress, and how often each kind of work remains, including the present one.

    ``steps``: training steps done; ``total``: of the whole run, None where not known yet;
    ``estimated``: ``total`` is what environment steps so far let expect.
    """

    steps: int
    total: int | None
    estimated: bool = False
    _: KW_ONLY
    evaluations: int = 0
    saves: int = 0


class Progress:
    """Seconds left = Σ over works of times still to be done · median of the latest durations.

    A work that was never measured counts for nothing, save training: without it there is no
    estimate. What the present work has taken so far is taken off its own share.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.remaining = Remaining(0, None)  # kept up to date by the loop
        self.work = ""
        self.share = 0.0  # of the present work, as far as it says
        self.listeners: list[Callable[[str], None]] = []  # called with each work that begins
        self.minutely: list[Callable[[str], None]] = []  # called once a minute with ``doing``
        self._started = self._since = self._reported = clock()
        self._recent: dict[str, deque[float]] = {}

    @property
    def elapsed(self) -> float:
        """Return the seconds of this process."""
        return self._clock() - self._started

    def begin(self, work: str) -> None:
        """Begin a piece of work; one before it that did not come to its end is not measured."""
        self.work, self.share = work, 0.0
        self._since = self._reported = self._clock()
        for tell in self.listeners:
            tell(work)

    def part(self, share: float) -> None:
        """Set the part of the present work that is done, in [0, 1]."""
        self.share = share
        if self._clock() - self._reported >= MINUTE:
            self._reported = self._clock()
            for tell in self.minutely:
                tell(self.doing)

    @property
    def doing(self) -> str:
        """Return the present work, how much of it is done and how long the rest will take."""
        if not self.share:
            return self.work
        if self.share < LITTLE:
            return f"{self.work} {self.share:.0%}"
        left = timedelta(seconds=round(self._rest()))
        return f"{self.work} {self.share:.0%}, {left} to go"

    def _rest(self) -> float:
        """Estimate the seconds of the present work to come, at the pace so far."""
        return (self._clock() - self._since) * (1 - self.share) / self.share

    def end(self) -> None:
        """End the present work."""
        self.note(self.work, self._clock() - self._since)
        self.work, self.share = "", 0.0

    def note(self, name: str, value: float) -> None:
        self._recent.setdefault(name, deque(maxlen=RECENT)).append(value)

    def typical(self, name: str) -> float | None:
        """Return the median of the latest values; None where there is none."""
        recent = self._recent.get(name)
        return statistics.median(recent) if recent else None

    def seconds_left(self) -> float | None:
        """Estimate the seconds left; None before the first training step, or for a run without
        end."""
        remaining = self.remaining
        if remaining.total is None:
            return None
        steps = max(remaining.total - remaining.steps, 0)
        if steps and self.typical(TRAINING) is None:
            return None
        counts = {TRAINING: steps, EVALUATING: remaining.evaluations, SAVING: remaining.saves}
        return math.fsum(self._seconds(work, count) for work, count in counts.items())

    def _seconds(self, work: str, count: int) -> float:
        each = self.typical(work) or 0.0
        if work != self.work or not count:
            return count * each
        if self.share >= LITTLE:
            return (count - 1) * each + self._rest()
        return (count - 1) * each + max(each - (self._clock() - self._since), 0.0)

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint: a resumed run knows at once how long it will take."""
        return {name: list(recent) for name, recent in self._recent.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        self._recent = {name: deque(map(float, latest), RECENT) for name, latest in state.items()}


class Written:
    """Completions, as they grow, as the share of the present work that they are.

    ``total``: how many there may be; where fewer will do, the work ends early.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.count = progress, total, 0.0

    def __call__(self, completions: float) -> None:
        self.count += completions
        self.progress.part(min(self.count / self.total, 1.0))
