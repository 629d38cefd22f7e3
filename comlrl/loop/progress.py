"""What a run is doing, and how long it will still take."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TRAINING, EVALUATING, SAVING = "training", "evaluating", "saving"
RECENT = 20  # durations of each work that the estimate rests on


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a run is, and how often each work is still to be done, the present one included.

    ``steps``: training steps done; ``total``: of the whole run, None where not known yet;
    ``estimated``: ``total`` is what environment steps so far let expect.
    """

    steps: int
    total: int | None
    estimated: bool = False
    evaluations: int = 0
    saves: int = 0


class Progress:
    """Seconds left = Σ over works of times still to be done · median of the latest durations.

    A work that was never measured counts for nothing, save training: without it there is no
    estimate. What the present work has taken so far is taken off its own share.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ahead = Ahead(0, None)  # kept up to date by the loop
        self.work = ""
        self.listeners: list[Callable[[str], None]] = []  # told of each work that begins
        self._started = self._since = clock()
        self._recent: dict[str, deque[float]] = {}

    @property
    def elapsed(self) -> float:
        """Seconds of this process."""
        return self._clock() - self._started

    def begin(self, work: str) -> None:
        """The present work; one before it that did not come to its end is not measured."""
        self.work, self._since = work, self._clock()
        for tell in self.listeners:
            tell(work)

    def end(self) -> None:
        """The present work is done."""
        self.note(self.work, self._clock() - self._since)
        self.work = ""

    def note(self, name: str, value: float) -> None:
        self._recent.setdefault(name, deque(maxlen=RECENT)).append(value)

    def typical(self, name: str) -> float | None:
        """Median of the latest values; None where there is none."""
        recent = self._recent.get(name)
        return statistics.median(recent) if recent else None

    def seconds_left(self) -> float | None:
        """None while nothing is known: before the first training step, or of a run without end."""
        ahead = self.ahead
        if ahead.total is None:
            return None
        steps = max(ahead.total - ahead.steps, 0)
        if steps and self.typical(TRAINING) is None:
            return None
        counts = {TRAINING: steps, EVALUATING: ahead.evaluations, SAVING: ahead.saves}
        return math.fsum(self._seconds(work, count) for work, count in counts.items())

    def _seconds(self, work: str, count: int) -> float:
        each = self.typical(work) or 0.0
        if work != self.work or not count:
            return count * each
        return (count - 1) * each + max(each - (self._clock() - self._since), 0.0)

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint: a resumed run knows at once how long it will take."""
        return {name: list(recent) for name, recent in self._recent.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        self._recent = {name: deque(map(float, latest), RECENT) for name, latest in state.items()}
