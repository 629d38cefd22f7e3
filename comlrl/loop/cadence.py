"""When a run ends, and when evaluations and checkpoints are due."""

from __future__ import annotations

from dataclasses import dataclass

from comlrl.loop.steps import Counters


@dataclass(frozen=True)
class Ends:
    """The limits of a run, which ends when it reaches the first; None: no such limit."""

    steps: int | None  # training steps
    env_steps: int | None

    def done(self, steps: int, env_steps: int) -> float:
        """Return the fraction of the run that is done, from 0 to 1."""
        ends = ((steps, self.steps), (env_steps, self.env_steps))
        return max(min(1.0, done / end) if end else 1.0 for done, end in ends if end is not None)

    def over(self, counters: Counters) -> bool:
        return self.done(counters.steps, counters.env_steps) >= 1


@dataclass(frozen=True)
class Cadence:
    """A cadence of ``every`` training steps, and after the last one; 0: never."""

    every: int

    def due(self, last: int, done: int, over: bool) -> bool:
        """Return whether the event is due after ``done`` training steps. ``last``: the training
        step after which it last happened (−1: never)."""
        return bool(self.every) and (done // self.every > last // self.every or over)
