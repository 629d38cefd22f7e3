"""What all training loops share: epochs, shuffling, cadences, resume, signals. Trainers use it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comlrl.errors import UserError, warning
from comlrl.evaluation.metrics import tree_metrics
from comlrl.loop import checkpoint
from comlrl.loop.alarm import CollapseAlarm
from comlrl.loop.best_model import BestModel
from comlrl.loop.interrupts import Interrupted, Signals
from comlrl.loop.parts import Part, Trainer
from comlrl.loop.progress import EVALUATING, SAVING, TRAINING, Ahead, Progress
from comlrl.loop.steps import Counters, Gathered, Step, peak_memory_mb
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.processes import distributed
from comlrl.rollout.grow import Greedy
from comlrl.types import Domain, Logger, LogMark, LogRecord, Task, Tree
from comlrl.update.minibatches import Span

ENV_STEPS = "environment steps"  # of a training step

Evaluate = Callable[[], tuple[list[Tree], dict[str, float]]]
Beside = Callable[[Sequence[Tree]], Mapping[str, float]]  # trees of an evaluation → more metrics


class Loop:
    """Yields training steps and does everything that is due after each."""

    def __init__(
        self,
        section: Any,
        tasks: Sequence[Task],
        *,
        domain: Domain,
        run_dir: Path,
        logger: Logger,
        progress: Progress | None = None,
        evaluate: Evaluate | None = None,
        seed: int = 0,
        signals: Signals | None = None,
        standing: Callable[[], Mapping[str, float]] = dict,
        best: BestModel | None = None,
        schedule: TaskSchedule | None = None,
        prefetch: Callable[[Step | None], None] | None = None,
    ) -> None:
        """``section``: the algorithm's keys. ``domain``: measures the trees. ``progress``: records
        what the run is doing. ``evaluate``: trees and metrics of the present policy; None: never.
        ``seed``: of the order of the tasks, and of what draws from global generators (dropout).
        ``signals``: None: none are heeded. ``standing``: metrics that go into every record; asked
        on all processes. ``best``: is offered the weights of every evaluation. ``schedule``: which
        tasks each step has; None: those of shuffled epochs. ``prefetch``: is called with the next
        step, or None after the last, once a step has its trees and before it learns from them."""
        self.section, self.tasks, self.domain = section, tasks, domain
        self.run_dir, self.logger, self.evaluate = run_dir, logger, evaluate
        self.seed, self.signals, self.standing = seed, signals or Signals(), standing
        self.best, self.prefetch = best, prefetch
        self.schedule = schedule or TaskSchedule(
            tasks, section.batch_size, section.num_train_epochs, seed
        )
        self.counters = Counters()
        self.latest: Mapping[str, float] = {}  # metrics of the latest training step
        self.progress = progress or Progress()
        self.parts: Mapping[str, Part] = {}  # of the trainer that runs
        self._started = time.monotonic()
        self._pause = 0.0  # seconds of logging within the present step
        self._saved: tuple[int, Path] | None = None  # training steps in the newest checkpoint
        self._alarm = CollapseAlarm()

    @property
    def mark(self) -> LogMark:
        """Up to where the run's log is its own: to the checkpoint that it continues from."""
        done = self.counters
        return (
            LogMark() if self._saved is None else LogMark(done.logged, done.updates, done.env_steps)
        )

    @property
    def total_steps(self) -> int | None:
        """Training steps of the run; None where environment steps alone end it."""
        known = [end for end in (self.section.max_steps, self.schedule.steps) if end is not None]
        return min(known) if known else None

    def span(self, env_steps: int) -> Span:
        """The present step's part of the run; ``env_steps``: those that it adds, of all
        processes."""
        done = self.counters
        return Span(
            self._part_done(done.steps, done.env_steps),
            self._part_done(done.steps + 1, done.env_steps + env_steps),
        )

    @property
    def wall_seconds(self) -> float:
        """Seconds since the run began, those of interrupted processes included."""
        return self.counters.wall_seconds + time.monotonic() - self._started

    def resume(
        self, found: checkpoint.Checkpoint, trainer: Trainer, *, force: bool = False
    ) -> None:
        """Continue from a checkpoint.

        Raises UserError where it was made by another team or (unless ``force``) other tasks, and
        where it is not as ``save`` writes it.
        """
        try:
            same = found.state["tasks"] == self._fingerprint
            self.counters = Counters.of(found.state["loop"])
            self._alarm.load(found.state["collapse"])
            self.progress.load(found.state.get("progress", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"--resume: {found.path} cannot be read: state.json: {_line(error)}"
            ) from error
        if not same and not force:
            raise UserError(
                f"--resume: the training tasks are not those of {found.path}; restore the "
                "dataset, or add --resume-force"
            )
        try:
            for name, part in trainer.parts().items():
                checkpoint.load_part(part, found.tensors[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"--resume: {found.path} does not fit this configuration: {_line(error)}"
            ) from error
        self._saved = (self.counters.steps, found.path)
        if self.best is not None:
            self.best.resume()

    def steps(self, trainer: Trainer, beside: Beside | None = None) -> Iterator[Step]:
        """Training steps until the first of the run's ends; evaluates before and after.

        ``beside``: what the trainer tells of an evaluation beside the metrics of its trees.
        """
        self.parts = trainer.parts()
        self.signals.defer()
        self._evaluate_if_due(beside)
        while not self._over():
            index = self.counters.steps
            epoch, tasks = self.schedule.at(index)
            self._seed(index + 1)
            self._pause, started = 0.0, time.monotonic()
            self._begin(TRAINING)
            yield Step(index + 1, epoch, tasks)
            self.counters.train_seconds += time.monotonic() - started - self._pause
            self._after(beside)

    def gather(self, step: Step, trees: Sequence[Tree], greedy: Greedy | None = None) -> Gathered:
        """What all processes have grown in a step; ends the rollout's time. A collective call."""
        step.clock.lap("rollout")
        nodes = [node for tree in trees for node in tree.nodes]
        scored, tokens = sum(len(n.scores_K) for n in nodes), sum(n.tokens for n in nodes)
        if greedy is not None:
            scored, tokens = scored + greedy.scored, tokens + greedy.tokens
        scored, tokens = int(distributed.total(scored)), int(distributed.total(tokens))
        span = self.span(scored)
        # All processes have sampled by now and meet again below, so an error here may be raised.
        if self.prefetch is not None:
            last = span.end >= 1 or self.signals.received is not None
            self.prefetch(None if last else Step(step.index + 1, *self.schedule.at(step.index)))
            step.clock.lap("rollout")
        return Gathered(distributed.gather(trees), scored, scored, tokens, span)

    def record(
        self, step: Step, gathered: Gathered, *, updates: int, metrics: Mapping[str, float]
    ) -> None:
        """Count a finished step and log it where the cadence says so.

        ``metrics`` stand beside those of the trees; they are the same on all processes.
        """
        step.clock.lap("update")
        counters = self.counters
        self._end()
        self.progress.note(ENV_STEPS, gathered.env_steps)
        counters.steps, counters.epoch = step.index, step.epoch
        counters.env_steps += gathered.env_steps
        counters.updates += updates
        counters.scored_joint_actions += gathered.scored
        counters.sampled_tokens += gathered.tokens
        counters.tasks_seen += len(step.tasks)
        self.progress.ahead = self._ahead()
        started = time.monotonic()
        self.latest = metrics = {**tree_metrics(gathered.trees, self.domain), **metrics}
        if step.index % self.section.logging_steps == 0 or self._over():
            step_metrics = self._step_metrics(step, gathered)
            self._log("train", {**metrics, **step_metrics}, gathered.trees)
        for text in self._alarm.look(metrics):
            warning(text)
        self._pause = time.monotonic() - started

    def skip(self, steps: int) -> None:
        """Continue after training step ``steps``: those up to it are left out."""
        self.counters.steps = max(self.counters.steps, steps)

    def tell(self, metrics: Mapping[str, float]) -> None:
        """Log what a stage before the training steps has come to. Called by all processes."""
        counters = self.counters
        counters.logged += 1  # resuming keeps as many lines as were counted
        self.logger.log(
            LogRecord(counters.env_steps, counters.updates, counters.epoch, "train", metrics)
        )

    def save(self) -> Path:
        """Write a checkpoint of this step, unless there is one; its path, on every process."""
        if self._saved is not None and self._saved[0] == self.counters.steps:
            return self._saved[1]
        self._begin(SAVING)
        state, tensors = self._content()
        path = distributed.from_main(lambda: self._write(state, tensors))
        self._saved = (self.counters.steps, path)
        self._end()
        return path

    def leave(self) -> Path | None:
        """The newest checkpoint, one of the last step where that has none; None: nothing was done.

        For a step that cannot be finished, before weights have moved; called by the main process
        alone.
        """
        if self.counters.steps and (self._saved is None or self._saved[0] < self.counters.steps):
            self._saved = (self.counters.steps, self._write(*self._content()))
        return None if self._saved is None else self._saved[1]

    def _content(self) -> tuple[dict[str, Any], dict[str, checkpoint.Tensors]]:
        """What a checkpoint holds."""
        state = {
            "loop": asdict(self.counters) | {"wall_seconds": self.wall_seconds},
            "collapse": self._alarm.state(),
            "progress": self.progress.state(),
            "tasks": self._fingerprint,
        }
        return state, {name: checkpoint.tensors_of(part) for name, part in self.parts.items()}

    def _write(self, state: Mapping[str, Any], tensors: Mapping[str, checkpoint.Tensors]) -> Path:
        limit = self.section.save_total_limit
        return checkpoint.save(self.run_dir, self.counters.steps, state, tensors, limit)

    @contextlib.contextmanager
    def watch(self, work: str) -> Iterator[None]:
        """A stage before or between the updates that asks ``heed`` about signals, and is not torn;
        within a training step it is a part of that."""
        if self.progress.work != TRAINING:
            self._begin(work)
        with self.signals.deferring():
            yield

    def heed(self, saved: Path) -> None:
        """Raises Interrupted where a signal has come; ``saved`` holds what was done since the last
        training step, and a checkpoint what was done before."""
        number = self._received()
        if number is not None:
            raise Interrupted(number, self.save() if self.counters.steps else saved)

    def _begin(self, work: str) -> None:
        self.progress.ahead = self._ahead()
        self.progress.begin(work)

    def _end(self) -> None:
        self.progress.end()
        self.progress.ahead = self._ahead()

    def _ahead(self) -> Ahead:
        """How far the run is; where environment steps end it, as far as the latest steps tell."""
        done, total, most = self.counters.steps, self.total_steps, self.section.max_env_steps
        each, estimated = self.progress.typical(ENV_STEPS), False
        if most is not None:
            if not each:
                return Ahead(done, None)
            end = done + max(math.ceil((most - self.counters.env_steps) / each), 0)
            estimated = total is None or end < total
            total = end if estimated else total
        if total is None:
            return Ahead(done, None)
        evaluations = saves = 0
        if self.evaluate is not None:
            evaluations = _due(self.counters.evaluated, total, self.section.eval_interval)
        if self.section.save_steps:
            saves = _due(self._saved[0] if self._saved else 0, total, self.section.save_steps)
        return Ahead(done, total, estimated, evaluations, saves)

    def _step_metrics(self, step: Step, gathered: Gathered) -> dict[str, float]:
        """What every trainer logs of a step: counts, times and memory."""
        seconds = step.clock.total
        metrics = {
            "tasks_seen": float(self.counters.tasks_seen),
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

    def _part_done(self, steps: int, env_steps: int) -> float:
        """The part of the run that is done, 0 to 1, by the end that comes first."""
        ends = ((steps, self.total_steps), (env_steps, self.section.max_env_steps))
        return max(min(1.0, done / end) if end else 1.0 for done, end in ends if end is not None)

    def _over(self) -> bool:
        return self._part_done(self.counters.steps, self.counters.env_steps) >= 1

    def _after(self, beside: Beside | None) -> None:
        """What is due after a step. Evaluation comes before saving, so that it is not repeated."""
        self._leave_if_asked()
        self._evaluate_if_due(beside)
        self._leave_if_asked()
        every = self.section.save_steps
        before = self._saved[0] if self._saved is not None else 0
        if every and (self.counters.steps // every > before // every or self._over()):
            self.save()

    def _leave_if_asked(self) -> None:
        number = self._received()
        if number is not None:
            raise Interrupted(number, self.save())

    def _evaluate_if_due(self, beside: Beside | None) -> None:
        """Before the first step, at the cadence, and after the last; once at each."""
        done, every = self.counters.steps, self.section.eval_interval
        if self.evaluate is None or not every or self.counters.evaluated == done:
            return
        if done // every > self.counters.evaluated // every or self._over():
            self._evaluate(beside)

    def _evaluate(self, beside: Beside | None) -> None:
        assert self.evaluate is not None
        # Several processes evaluate together: there one cannot leave in the middle.
        alone = distributed.world_size() == 1
        self._begin(EVALUATING)
        try:
            with self.signals.abandoning() if alone else contextlib.nullcontext():
                trees, metrics = self.evaluate()
                if beside is not None:
                    metrics |= beside(trees)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.number, self.save()) from None
        self.counters.evaluated = self.counters.steps
        self._end()
        self._log("eval", metrics, trees)
        self.counters.eval_end = dict(metrics)
        if self.counters.eval_start is None:
            self.counters.eval_start = dict(metrics)
        if self.best is not None:
            counts = {"training_step": self.counters.steps, "env_steps": self.counters.env_steps}
            self.best.offer(counts | {"reward_mean": metrics["reward_mean"]})

    def _log(self, phase: Any, metrics: Mapping[str, float], trees: Sequence[Tree]) -> None:
        counters = self.counters
        counters.logged += 1
        metrics = {**metrics, **self.standing(), "training_step": float(counters.steps)}
        record = LogRecord(counters.env_steps, counters.updates, counters.epoch, phase, metrics)
        self.logger.log(record)
        if trees:
            self.logger.episodes(record, trees)

    def _received(self) -> int | None:
        """The signal that any process has received, or None."""
        return max(distributed.all_gather(self.signals.received or 0)) or None

    def _seed(self, step: int) -> None:
        """Global generators anew at each step, alike on all processes: dropout and the like then
        need no generator state to resume."""
        seed = int(hashlib.blake2b(f"{self.seed} {step}".encode(), digest_size=4).hexdigest(), 16)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    @cached_property
    def _fingerprint(self) -> str:
        """Of the training tasks, in order."""
        digest = hashlib.sha256()
        for task in self.tasks:
            digest.update(repr((task.task_id, sorted(task.fields.items()))).encode())
        return digest.hexdigest()


def _due(last: int, total: int, every: int) -> int:
    """How often it is due after ``last`` (−1: not even at 0): every ``every`` steps, and last."""
    if not every or last >= total:
        return 0
    return total // every - last // every + (total % every > 0)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
