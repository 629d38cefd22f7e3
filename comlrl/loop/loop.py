"""The training loop that all trainers share.

The order of events:

    steps ──► evaluation, where one is due: before the first step, at the cadence, after the last
      │
      │   until the run is over:
      ├─► grow trees ──► gather ──► algorithm: credit, learn ──► record: counts, log, alarm
      │              (the next step's trees may begin to grow)
      └─► signal? ──► evaluation? ──► signal? ──► checkpoint? ──► the next step

``TaskSchedule`` chooses each step's tasks and ``Ends`` ends the run. ``Evaluations`` and
``Checkpoints`` decide when they are due, ``RunLog`` makes log records, ``Signals`` receives
requests to end the run, ``Progress`` displays it, and ``Counters`` counts its steps and samples.
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

SAVE_SECONDS = 600.0  # between checkpoints if ``save_steps`` is not set

# Trees of an evaluation → more metrics.
ExtraMetrics = Callable[[Sequence[RolloutResult]], Mapping[str, float]]


class Loop:
    """Runs training steps and everything that is due after each."""

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
        """Set up the loop. ``section``: the algorithm's keys. ``evaluations``, ``signals``: None
        for none. ``progress``: displays the current work. ``prefetch`` is called with the next step
        after a step's trees are sampled and before it learns from them; with None if no step
        follows or a checkpoint comes first, since a resumed run would not have the trees.
        ``cost``: of a task, by which ``deal`` balances processes."""
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
        self._late_at = 0, False  # a number of steps, and whether a checkpoint is due then by time
        self._pause = 0.0  # seconds of logging within the current step

    @property
    def tasks(self) -> Sequence[Task]:
        """Return all training tasks."""
        return self.schedule.tasks

    @property
    def logger(self) -> Logger:
        return self.log.logger

    @property
    def mark(self) -> LogMark:
        """Return the mark up to which a resumed run keeps its log: that of its checkpoint."""
        done = self.counters
        if self.checkpoints.newest is None:
            return LogMark()
        return LogMark(done.logged, done.updates, done.env_steps)

    def deal(self, tasks: Sequence[Task]) -> Deal:
        """Divide tasks among processes by their costs."""
        return distributed.deal(tasks, self.cost)

    def _dealt(self, step: Step) -> Step:
        return replace(step, deal=self.deal(step.tasks))

    def span(self, env_steps: int) -> Span:
        """Return the current step's span of the run's progress; ``env_steps``: how many the step
        adds, over all processes."""
        done = self.counters
        return Span(
            self.ends.done(done.steps, done.env_steps),
            self.ends.done(done.steps + 1, done.env_steps + env_steps),
        )

    @property
    def wall_seconds(self) -> float:
        """Return the run's wall-clock seconds, including those before it was resumed."""
        return self.counters.wall_seconds + time.monotonic() - self._started

    def resume(self, restored: Checkpoint, trainer: HasParts, *, force: bool = False) -> None:
        """Continue from a checkpoint.

        Raises UserError if the checkpoint does not fit the trainer's parts or (unless ``force``)
        the training tasks, or if ``save`` did not write it.
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
            # Keep the budget on a different GPU, and after memory ran out: float sums depend on it.
            if agent is not None and tokens != token_budget(agent):
                agent.micro_batch_tokens = tokens
        if self.evaluations is not None and self.evaluations.best is not None:
            self.evaluations.best.resume()

    def steps(self, trainer: HasParts, extra_metrics: ExtraMetrics | None = None) -> Iterator[Step]:
        """Yield training steps until the run ends. Evaluates, saves and begins the trainer's
        rounds, if it has any, when they are due.

        ``extra_metrics``: trees of an evaluation → metrics to add to it.
        """
        rounds = trainer if isinstance(trainer, InRounds) else None
        present = self.schedule.round_of(self.counters.steps)
        self._reach()
        if rounds is not None and (self.counters.steps or not self._over):
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
        """Print a notice if the run ended within the warm-up of its learning rate."""
        parts = self.checkpoints.parts.values()
        for made in (part.schedule for part in parts if isinstance(part, AgentOptimizer)):
            if 0 < made.updates < made.warmup:
                notice(
                    f"warmup_steps={made.warmup}, and the run made {made.updates} updates: the "
                    "learning rate never reached its full value"
                )
                break

    def train(self, algorithm: Algorithm[Any]) -> None:
        """Run all training steps of an algorithm with ``advance``."""
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
        """Gather the rollouts of all processes, and end the time that counts as sampling.

        A collective call: every process passes its own trees. They come back without
        ``Completion.support`` if there are several processes.
        """
        step.clock.lap("rollout")
        scored, tokens = sum(tree.scored for tree in trees), sum(tree.tokens for tree in trees)
        sums = distributed.all_reduce_counts({"scored": scored, "tokens": tokens})
        scored, tokens = int(sums["scored"]), int(sums["tokens"])
        span = self.span(scored)
        # All processes have sampled and synchronize again below, so raising an error here is safe.
        if self.prefetch is not None:
            alone = span.end >= 1 or self._saves_after(step.index) or self._received() is not None
            following = None if alone else Step(step.index + 1, *self.schedule.at(step.index))
            self.prefetch(following and self._dealt(following))
            step.clock.lap("rollout")
        if distributed.world_size() > 1:  # only the process that learns from a tree needs support
            trees = step.deal.gather([tree.without_support() for tree in trees])
        return Gathered(trees=trees, env_steps=scored, scored=scored, tokens=tokens, span=span)

    def record(
        self, step: Step, gathered: Gathered, *, updates: int, metrics: Mapping[str, float]
    ) -> None:
        """Count a finished step, and log it every ``logging_steps`` steps and after the last.

        ``metrics`` are added to those of the trees; they must be equal on all processes.
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
        """Count joint actions scored for training, tokens sampled for them, and environment
        steps."""
        self.counters.scored_joint_actions += scored
        self.counters.sampled_tokens += tokens
        self.counters.env_steps += env_steps

    @property
    def notes(self) -> dict[str, Any]:
        """The state of stages outside the training steps, by name, stored in checkpoints."""
        return self.counters.extra

    def skip(self, steps: int) -> None:
        """Continue after training step ``steps``, skipping any steps up to it."""
        self.counters.steps = max(self.counters.steps, steps)

    def tell(self, metrics: Mapping[str, float]) -> None:
        """Log the result of a stage outside the training steps. All processes must call it."""
        self.log.stage(self.counters, metrics)

    def save(self) -> Path:
        """Save a checkpoint after the current step, unless one exists; return its path. A
        collective call."""
        newest = self.checkpoints.newest
        if newest is not None and newest[0] == self.counters.steps:
            return newest[1]
        self.progress.begin(SAVING)
        path = self.checkpoints.save(self.counters.steps, self._state())
        self._saved = time.monotonic()
        self.progress.end()
        return path

    def leave(self) -> Path | None:
        """Save a checkpoint after the last finished step, unless one exists; return the newest, or
        None if no step was finished.

        For a step that fails before it changes weights. Called only by the main process.
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
        """Show a stage's progress and defer signals during it; the stage calls ``heed`` when it may
        be interrupted. Within a training step, the step remains the displayed work."""
        if self.progress.work != TRAINING:
            self.progress.begin(work)
        with self.signals.deferring():
            yield

    def heed(self, saved: Path) -> None:
        """Raise Interrupted if a signal was received. ``saved``: the file with the stage's work;
        earlier training steps are saved in a checkpoint."""
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
        """Evaluate and save if due after a step. Evaluation comes first, so that a resumed run does
        not repeat it."""
        self._leave_if_asked()
        saves = self._saves_after(self.counters.steps, self._over)
        self._evaluate_if_due(extra_metrics)
        self._leave_if_asked()
        if saves:
            self.save()

    def _saves_after(self, steps: int, over: bool = False) -> bool:
        """Return whether a checkpoint is due after ``steps`` training steps. A collective call.

        Without ``save_steps`` it is due at evaluations, and ``SAVE_SECONDS`` after the last
        checkpoint. The main process checks its clock once a step, as ``prefetch`` relies on it.
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
        # Several processes evaluate collectively, so none may leave in the middle.
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
        """Return a signal that any process received, or None. A collective call."""
        return max(distributed.all_gather(self.signals.received or 0)) or None


def _reader(part: Part | None) -> Agent | None:
    """Return the language model of a part, which determines its micro-batches; None if it has
    none."""
    part = part.agent if isinstance(part, LanguageCritic) else part
    return part if isinstance(part, Agent) else None
