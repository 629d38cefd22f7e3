"""The loop that all trainers share. It owns the order of events.

The order of events:

    steps ──► evaluation, where one is due: before the first step, at the cadence, after the last
      │
      │   until the run is over:
      ├─► grow trees ──► gather ──► algorithm: credit, learn ──► record: counts, log, alarm
      │              (the next step's trees may begin to grow)
      └─► signal? ──► evaluation? ──► signal? ──► checkpoint? ──► the next step

``TaskSchedule`` says which tasks a step has and ``Ends`` where the run ends; ``Evaluations`` and
``Checkpoints`` know when they are due; ``RunLog`` makes the records; ``Signals`` tells whether the
run was asked to end, ``Progress`` how long it will take. ``Counters`` are how far it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from comlrl.config.algorithms import CommonConfig
from comlrl.credit.decisions import decisions_of
from comlrl.errors import UserError, notice
from comlrl.loop.cadence import Cadence, Ends
from comlrl.loop.checkpoint import Checkpoint, Checkpoints, short
from comlrl.loop.evaluations import Evaluations
from comlrl.loop.interrupts import Interrupted, Signals
from comlrl.loop.parts import Algorithm, HasParts, InRounds, Part, Refilling
from comlrl.loop.progress import EVALUATING, SAVING, TRAINING, Progress
from comlrl.loop.records import Logger, LogMark
from comlrl.loop.run_log import RunLog
from comlrl.loop.steps import Counters, Gathered, Rolled, Step, seed_generators
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.models.agent import Agent
from comlrl.models.critics import LanguageCritic
from comlrl.processes import cpu_threads, distributed
from comlrl.processes.distributed import Deal
from comlrl.types import RolloutResult, Task
from comlrl.update.accumulate import token_budget
from comlrl.update.minibatches import Span
from comlrl.update.optimizer import AgentOptimizer

SAVE_SECONDS = 600.0  # between checkpoints, where no number of steps is set

# Trees of an evaluation → more metrics.
ExtraMetrics = Callable[[Sequence[RolloutResult]], Mapping[str, float]]


class Loop:
    """Yields training steps and does everything that is due after each."""

    def __init__(
        self,
        section: CommonConfig,
        schedule: TaskSchedule,
        run_dir: Path,
        log: RunLog,
        *,
        evaluations: Evaluations | None = None,
        signals: Signals | None = None,
        progress: Progress | None = None,
        prefetch: Callable[[Step | None], None] | None = None,
        cost: Callable[[Task], int] | None = None,
    ) -> None:
        """Set up the loop. ``section``: the algorithm's keys. ``evaluations``: None: there are
        none. ``signals``: None: none are heeded. ``progress``: records what the run is doing.
        ``prefetch``: is called with the next step once a step has its trees and before it learns
        from them; with None where no step follows, or one after a checkpoint: a resumed run
        would not have its trees. ``cost``: of a task, by which ``deal`` divides them."""
        self.section, self.schedule, self.run_dir, self.log = section, schedule, run_dir, log
        self.evaluations, self.prefetch, self.cost = evaluations, prefetch, cost
        self.signals, self.progress = signals or Signals(), progress or Progress()
        limits = [end for end in (section.max_steps, schedule.steps) if end is not None]
        self.ends = Ends(min(limits) if limits else None, section.max_env_steps)
        by_time = section.save_steps is None
        limit = 1 if by_time else section.save_total_limit
        self.checkpoints = Checkpoints(run_dir, Cadence(section.save_steps or 0), limit)
        self.counters = Counters()
        self.latest: Mapping[str, float] = {}  # metrics of the latest training step
        self._started = self._saved = time.monotonic()
        self._late_at = 0, False  # training steps, and whether a checkpoint is due by the clock
        self._pause = 0.0  # seconds of logging within the present step

    @property
    def tasks(self) -> Sequence[Task]:
        """Return all training tasks."""
        return self.schedule.tasks

    @property
    def logger(self) -> Logger:
        return self.log.logger

    @property
    def mark(self) -> LogMark:
        """Return the mark up to which the run's log is kept: the checkpoint that it continues
        from."""
        done = self.counters
        if self.checkpoints.newest is None:
            return LogMark()
        return LogMark(done.logged, done.updates, done.env_steps)

    def deal(self, tasks: Sequence[Task]) -> Deal:
        """Divide tasks over the processes, by their costs."""
        return distributed.deal(tasks, self.cost)

    def _dealt(self, step: Step) -> Step:
        return replace(step, deal=self.deal(step.tasks))

    def span(self, env_steps: int) -> Span:
        """Return the present step's part of the run; ``env_steps``: those that it adds, of all
        processes."""
        done = self.counters
        return Span(
            self.ends.done(done.steps, done.env_steps),
            self.ends.done(done.steps + 1, done.env_steps + env_steps),
        )

    @property
    def wall_seconds(self) -> float:
        """Return the seconds since the run began, those of interrupted processes included."""
        return self.counters.wall_seconds + time.monotonic() - self._started

    def resume(self, restored: Checkpoint, trainer: HasParts, *, force: bool = False) -> None:
        """Continue from a checkpoint.

        Raises UserError where it was made by another team or (unless ``force``) other tasks, and
        where it is not as ``save`` writes it.
        """
        try:
            same = restored.state["tasks"] == self.schedule.fingerprint
            self.counters = Counters.from_dict(restored.state["loop"])
            self.log.alarm.load(restored.state["collapse"])
            if self.log.sampled is not None:
                self.log.sampled.load(restored.state.get("sampled", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"--resume: {restored.path} cannot be read: state.json: {short(error)}"
            ) from error
        if not same and not force:
            raise UserError(
                f"--resume: the training tasks are not those of {restored.path}; restore the "
                "dataset, or add --resume-force"
            )
        self.checkpoints.resume(restored, self.counters.steps, trainer.parts())
        for name, tokens in restored.state.get("micro_batch_tokens", {}).items():
            agent = _reader(trainer.parts().get(name))
            # Another GPU would take others, or memory had run out.
            if agent is not None and tokens != token_budget(agent):
                agent.micro_batch_tokens = tokens
        if self.evaluations is not None and self.evaluations.best is not None:
            self.evaluations.best.resume()

    def steps(self, trainer: HasParts, extra_metrics: ExtraMetrics | None = None) -> Iterator[Step]:
        """Yield the training steps until the first of the run's ends; evaluate before and after,
        and begin the rounds of a trainer that has some.

        ``extra_metrics``: of an evaluation, added to the metrics of its trees.
        """
        rounds = trainer if isinstance(trainer, InRounds) else None
        present = self.schedule.round_of(self.counters.steps)
        self._reach()
        if rounds is not None:
            started = time.monotonic()
            rounds.begin_round(present)
            self.counters.train_seconds += time.monotonic() - started
        self.checkpoints.begin(trainer.parts())
        self.signals.defer()
        self._evaluate_if_due(extra_metrics)
        while not self._over:
            index = self.counters.steps
            epoch, tasks = self.schedule.at(index)
            seed_generators(self.schedule.seed, index + 1)
            self._pause, started = 0.0, time.monotonic()
            self.progress.begin(TRAINING)
            step = Step(index + 1, epoch, tasks)
            if rounds is not None:
                if self.schedule.round_of(index) != present:
                    present = self.schedule.round_of(index)
                    rounds.begin_round(present)
                step.clock.lap("label")
            yield step
            self.counters.train_seconds += time.monotonic() - started - self._pause
            self._after(extra_metrics)
        self._check_warmup()

    def _check_warmup(self) -> None:
        """Give notice where the run has ended within the warm-up of its learning rate."""
        parts = self.checkpoints.parts.values()
        for made in (part.schedule for part in parts if isinstance(part, AgentOptimizer)):
            if 0 < made.updates < made.warmup:
                notice(
                    f"warmup_steps={made.warmup}, and the run made {made.updates} updates: the "
                    "learning rate never reached its full value"
                )
                break

    def train(self, algorithm: Algorithm[Any]) -> None:
        """Run all training steps, each by ``advance``."""
        for step in self.steps(algorithm):
            self.advance(step, algorithm)

    def advance(self, step: Step, algorithm: Algorithm[Any]) -> None:
        """Run a training step: grow, gather, credit, learn, record."""
        section, step = algorithm.section, self._dealt(step)
        trees = algorithm.rollout.grow(
            step.deal.shard(step.tasks),
            section.shape,
            algorithm.sampling,
            step.key,
            section.discount if section.samples_greedily else None,
        )
        if isinstance(algorithm, Refilling):
            step, trees = algorithm.refilled(step, trees)
        gathered = self.gather(step, trees)
        rolled = Rolled(
            decisions=decisions_of(trees, section.discount, section.leniency(gathered.span.start)),
            index=step.index,
            deal=step.deal,
            span=gathered.span,
            scored=gathered.scored,
        )
        metrics = algorithm.learn(rolled, algorithm.credit(rolled))
        updates = int(metrics.pop("updates"))
        self.record(step, gathered, updates=updates, metrics=metrics)

    def gather(self, step: Step, trees: Sequence[RolloutResult]) -> Gathered:
        """Gather the rollouts of all processes; ends the time that counts as sampling.

        A collective call: every process passes its own trees.
        """
        step.clock.lap("rollout")
        scored, tokens = sum(tree.scored for tree in trees), sum(tree.tokens for tree in trees)
        sums = distributed.all_reduce_counts({"scored": scored, "tokens": tokens})
        scored, tokens = int(sums["scored"]), int(sums["tokens"])
        span = self.span(scored)
        # All processes have sampled by now and meet again below, so an error here may be raised.
        if self.prefetch is not None:
            alone = span.end >= 1 or self._saves_after(step.index) or self._received() is not None
            following = None if alone else Step(step.index + 1, *self.schedule.at(step.index))
            self.prefetch(following and self._dealt(following))
            step.clock.lap("rollout")
        if distributed.world_size() > 1:  # supports stay where they are learned from
            trees = step.deal.gather([tree.without_support() for tree in trees])
        return Gathered(trees=trees, env_steps=scored, scored=scored, tokens=tokens, span=span)

    def record(
        self, step: Step, gathered: Gathered, *, updates: int, metrics: Mapping[str, float]
    ) -> None:
        """Count a finished step and log it where the cadence says so.

        ``metrics`` stand beside those of the trees; they are the same on all processes.
        """
        step.clock.lap("update")
        counters = self.counters
        self.progress.end()
        counters.steps, counters.epoch = step.index, step.epoch
        counters.updates += updates
        counters.tasks_seen += len(step.tasks)
        self.count(scored=gathered.scored, tokens=gathered.tokens, env_steps=gathered.env_steps)
        self._reach()
        started = time.monotonic()
        due = step.index % self.section.logging_steps == 0 or self._over
        self.latest = self.log.step(counters, step, gathered, metrics, due=due)
        self._pause = time.monotonic() - started

    def count(self, *, scored: int = 0, tokens: int = 0, env_steps: int = 0) -> None:
        """Count the joint actions that were scored for training, the tokens that were sampled
        for them, and those that are steps of the x-axis."""
        self.counters.scored_joint_actions += scored
        self.counters.sampled_tokens += tokens
        self.counters.env_steps += env_steps

    @property
    def notes(self) -> dict[str, Any]:
        """The state that stages beside the training steps keep in checkpoints, by name."""
        return self.counters.extra

    def skip(self, steps: int) -> None:
        """Continue after training step ``steps``: those up to it are left out."""
        self.counters.steps = max(self.counters.steps, steps)

    def tell(self, metrics: Mapping[str, float]) -> None:
        """Log the result of a stage before the training steps. Called by all processes."""
        self.log.stage(self.counters, metrics)

    def save(self) -> Path:
        """Write a checkpoint of this step, unless there is one; return its path, on every
        process."""
        newest = self.checkpoints.newest
        if newest is not None and newest[0] == self.counters.steps:
            return newest[1]
        self.progress.begin(SAVING)
        path = self.checkpoints.save(self.counters.steps, self._state())
        self._saved = time.monotonic()
        self.progress.end()
        return path

    def leave(self) -> Path | None:
        """Return the newest checkpoint, of the last step where that has none; None: nothing was
        done.

        For a step that cannot be finished, before weights have moved. Called by the main process
        alone.
        """
        if self.checkpoints.steps < self.counters.steps:
            self.checkpoints.save(self.counters.steps, self._state(), alone=True)
        newest = self.checkpoints.newest
        return None if newest is None else newest[1]

    def _state(self) -> dict[str, Any]:
        """Return the content of a checkpoint's ``state.json``."""
        return {
            "loop": asdict(self.counters) | {"wall_seconds": self.wall_seconds},
            "collapse": self.log.alarm.state(),
            "sampled": {} if self.log.sampled is None else self.log.sampled.state(),
            "tasks": self.schedule.fingerprint,
            "micro_batch_tokens": {
                name: token_budget(agent)
                for name, part in self.checkpoints.parts.items()
                if (agent := _reader(part)) is not None
            },
        } | cpu_threads.state()

    @contextlib.contextmanager
    def watch(self, work: str) -> Iterator[None]:
        """Watch a stage before or between the updates that asks ``heed`` about signals, and is
        not torn; within a training step it is a part of that."""
        if self.progress.work != TRAINING:
            self.progress.begin(work)
        with self.signals.deferring():
            yield

    def heed(self, saved: Path) -> None:
        """Raise Interrupted where a signal has come; ``saved`` holds what was done since the
        last training step, and a checkpoint what was done before."""
        number = self._received()
        if number is not None:
            raise Interrupted(number, self.save() if self.counters.steps else saved)

    def _reach(self) -> None:
        done = self.counters
        share = self.ends.done(done.steps, done.env_steps)
        self.progress.reach(done.steps, self.ends.steps, share)

    @property
    def _over(self) -> bool:
        return self.ends.over(self.counters)

    def _after(self, extra_metrics: ExtraMetrics | None) -> None:
        """Do what is due after a step. Evaluation comes before saving, so that it is not
        repeated."""
        self._leave_if_asked()
        saves = self._saves_after(self.counters.steps, self._over)
        self._evaluate_if_due(extra_metrics)
        self._leave_if_asked()
        if saves:
            self.save()

    def _saves_after(self, steps: int, over: bool = False) -> bool:
        """Return whether a checkpoint is due after so many training steps.

        By default at an evaluation, and ten minutes after the last one by the main process's clock,
        which is asked once a step: the step may have gone on by the answer. A collective call.
        """
        if self.section.save_steps is not None:
            return self.checkpoints.cadence.due(self.checkpoints.steps, steps, over)
        if self.evaluations is not None and self.evaluations.due(self.counters, steps, over):
            return True
        if self._late_at[0] != steps:
            late = time.monotonic() - self._saved >= SAVE_SECONDS
            self._late_at = steps, distributed.all_gather(late)[0]
        return self._late_at[1]

    def _leave_if_asked(self) -> None:
        number = self._received()
        if number is not None:
            raise Interrupted(number, self.save())

    def _evaluate_if_due(self, extra_metrics: ExtraMetrics | None) -> None:
        done, evaluations = self.counters, self.evaluations
        if evaluations is None or not evaluations.due(done, done.steps, self._over):
            return
        # Several processes evaluate together: there one cannot leave in the middle.
        alone = distributed.world_size() == 1
        self.progress.begin(EVALUATING)
        started = time.monotonic()
        try:
            with self.signals.abandoning() if alone else contextlib.nullcontext():
                trees, metrics = evaluations.evaluate()
                if extra_metrics is not None:
                    metrics |= extra_metrics(trees)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.number, self.save()) from None
        self.counters.evaluation_seconds += time.monotonic() - started
        self.counters.evaluated = self.counters.steps
        self.progress.end()
        self.log.write(self.counters, "eval", metrics, trees)
        evaluations.note(self.counters, metrics)

    def _received(self) -> int | None:
        """Return the signal that any process has received, or None."""
        return max(distributed.all_gather(self.signals.received or 0)) or None


def _reader(part: Part | None) -> Agent | None:
    """Return the language model whose micro-batches a part is read in, if it has one."""
    part = part.agent if isinstance(part, LanguageCritic) else part
    return part if isinstance(part, Agent) else None
