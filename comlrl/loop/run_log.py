"""Logs a run's steps, evaluations and other stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from comlrl.errors import warning
from comlrl.evaluation.metrics import tree_metrics
from comlrl.loop.alarm import CollapseAlarm
from comlrl.loop.records import Logger, LogRecord
from comlrl.loop.steps import Counters, Gathered, Step, peak_memory_mb
from comlrl.types import Domain, RolloutResult
from comlrl.update.importance import ImportanceWeightedSampler


class RunLog:
    """Makes a run's log records and passes them to the logger. All processes must call it."""

    def __init__(
        self,
        logger: Logger,
        domain: Domain,
        standing: Callable[[], Mapping[str, float]] = dict,
        sampled: ImportanceWeightedSampler | None = None,
    ) -> None:
        """Set up the log. ``domain``: measures the trees. ``standing``: returns metrics for every
        record of a step or an evaluation. ``sampled``: source of metrics of training samples, or
        None. Both are called on all processes."""
        self.logger, self.domain = logger, domain
        self.standing, self.sampled = standing, sampled
        self.alarm = CollapseAlarm()

    def step(
        self,
        counters: Counters,
        step: Step,
        gathered: Gathered,
        metrics: Mapping[str, float],
        *,
        due: bool,
    ) -> Mapping[str, float]:
        """Log a training step if ``due``; return its metrics, including those of the trees."""
        metrics = {**tree_metrics(gathered.trees, self.domain), **metrics}
        if due:
            costs = _costs(counters, step, gathered)
            weights = {} if self.sampled is None else self.sampled.metrics()
            logged = {**metrics, **weights, **costs}
            self.write(counters, "train", logged, gathered.trees)
        elif self.sampled is not None:
            self.sampled.collect()
        sampled = {"tokens": float(gathered.tokens)} if gathered.trees else {}
        for text in self.alarm.look({**metrics, **sampled}):
            warning(text)
        return metrics

    def stage(self, counters: Counters, metrics: Mapping[str, float]) -> None:
        """Log the result of a stage outside the training steps."""
        counters.logged += 1  # a resumed run keeps this many lines
        self.logger.log(_record(counters, "train", metrics))

    def write(
        self,
        counters: Counters,
        phase: Literal["train", "eval"],
        metrics: Mapping[str, float],
        trees: Sequence[RolloutResult],
    ) -> None:
        """Log a record of a step or an evaluation, with its episodes."""
        counters.logged += 1
        metrics = {**metrics, **self.standing(), "training_step": float(counters.steps)}
        record = _record(counters, phase, metrics)
        self.logger.log(record)
        if trees:
            self.logger.episodes(record, trees)


def _record(
    counters: Counters, phase: Literal["train", "eval"], metrics: Mapping[str, float]
) -> LogRecord:
    return LogRecord(
        step=counters.env_steps,
        update=counters.updates,
        epoch=counters.epoch,
        phase=phase,
        metrics=metrics,
    )


def _costs(counters: Counters, step: Step, gathered: Gathered) -> dict[str, float]:
    """Return the counts, times and memory of a step that every algorithm logs."""
    seconds = step.clock.total
    metrics = {
        "tasks_seen": float(counters.tasks_seen),
        "step_seconds": seconds,
        "peak_memory_mb": peak_memory_mb(),
    }
    if gathered.scored:
        metrics |= {
            "tokens": float(gathered.tokens),
            "joint_actions_per_second": gathered.scored / seconds,
            "tokens_per_second": gathered.tokens / seconds,
        }
        metrics |= {f"time/{k}_share": s / seconds for k, s in step.clock.seconds.items()}
    return metrics
