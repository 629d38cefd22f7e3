"""A run's evaluations: when they are due, and the best model among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from comlrl.loop.best_model import BestModel
from comlrl.loop.cadence import Cadence
from comlrl.loop.steps import Counters
from comlrl.types import RolloutResult


@dataclass(frozen=True)
class Evaluations:
    """Evaluates the current policy on held-out tasks: ``evaluate`` returns trees and metrics, and
    ``best`` may store the weights."""

    evaluate: Callable[[], tuple[list[RolloutResult], dict[str, float]]]
    cadence: Cadence
    best: BestModel | None = None

    def due(self, counters: Counters, steps: int, over: bool) -> bool:
        """Return whether an evaluation is due after training step ``steps``, which may be a future
        one: before the first step, at the cadence, and after the last; once at each."""
        last = counters.evaluated
        return last != steps and self.cadence.due(last, steps, over)

    def note(self, counters: Counters, metrics: dict[str, float]) -> None:
        """Record the metrics of an evaluation of the current policy. A collective call."""
        counters.eval_end = dict(metrics)
        if counters.eval_start is None:
            counters.eval_start = dict(metrics)
        if self.best is not None:
            counts = {"training_step": counters.steps, "env_steps": counters.env_steps}
            self.best.offer(counts | {"reward_mean": metrics["reward_mean"]})
