"""What all training loops share: epochs, shuffling, cadences, resume, signals. Trainers use it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from comlrl import checkpoint, distributed
from comlrl.types import Logger, LogRecord, Task, Tree


class Interrupted(Exception):
    """A signal ended the run after a checkpoint was saved; ``code`` is the exit code."""

    def __init__(self, number: int, path: Path | None) -> None:
        self.code = 128 + number
        where = f"saved {path}; continue with --resume" if path else "nothing was saved"
        super().__init__(f"{signal.Signals(number).name}: {where}")


class Stateful(Protocol):
    """What a trainer gives to its checkpoints."""

    def state(self) -> dict[str, Any]: ...  # JSON

    def state_tensors(self) -> dict[str, Mapping[str, torch.Tensor]]: ...

    def load(
        self, state: Mapping[str, Any], tensors: Mapping[str, dict[str, torch.Tensor]]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: the tasks whose trees are grown together."""

    index: int  # 1-based
    epoch: int  # 0-based
    tasks: list[Task]


@dataclass
class Counters:
    """How far a run has come; all of it stands in a checkpoint."""

    steps: int = 0
    epoch: int = 0
    env_steps: int = 0
    updates: int = 0
    scored_joint_actions: int = 0
    sampled_tokens: int = 0
    train_seconds: float = 0.0
    eval_start: dict[str, float] | None = None
    eval_end: dict[str, float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # the W&B run id


class Loop:
    """Yields training steps and does everything that is due after each."""

    def __init__(
        self,
        section: Any,
        tasks: Sequence[Task],
        shuffle: Callable[[int, int], Sequence[int]],
        *,
        run_dir: Path,
        logger: Logger,
        evaluate: Callable[[], tuple[list[Tree], dict[str, float]]] | None,
    ) -> None:
        """``section``: the algorithm's keys. ``shuffle``: (epoch, count) → order of the tasks.
        ``evaluate``: trees and metrics of the present policy; None: never."""
        self.section, self.tasks, self.shuffle = section, tasks, shuffle
        self.run_dir, self.logger, self.evaluate = run_dir, logger, evaluate
        self.counters = Counters()
        self.trainer: Stateful | None = None
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._collapse = Collapse()

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.tasks) / self.section.batch_size)

    @property
    def total_steps(self) -> int | None:
        """Training steps of the run; None where environment steps alone end it."""
        ends = [
            self.section.max_steps,
            None
            if self.section.num_train_epochs is None
            else self.section.num_train_epochs * self.steps_per_epoch,
        ]
        known = [end for end in ends if end is not None]
        return min(known) if known else None

    def resume(self, found: checkpoint.Checkpoint, trainer: Stateful) -> None:
        """Go on from a checkpoint."""
        self.counters = Counters(**found.state["loop"])
        trainer.load(found.state["trainer"], found.tensors)

    def steps(self, trainer: Stateful) -> Iterator[Step]:
        """Training steps until the first of the run's ends; evaluates before and after."""
        self.trainer = trainer
        with self._signals():
            if self.counters.steps == 0:
                self._evaluate()
            while not self._over():
                index = self.counters.steps
                epoch, within = divmod(index, self.steps_per_epoch)
                order = self.shuffle(epoch, len(self.tasks))
                size = self.section.batch_size
                chosen = [self.tasks[i] for i in order[within * size : (within + 1) * size]]
                started = time.monotonic()
                yield Step(index + 1, epoch, chosen)
                self.counters.train_seconds += time.monotonic() - started - self._pause
                self._after()
            if self.section.eval_interval and self.counters.steps % self.section.eval_interval:
                self._evaluate()

    def record(
        self,
        step: Step,
        *,
        env_steps: int,
        updates: int,
        scored: int,
        tokens: int,
        metrics: Mapping[str, float],
        trees: Sequence[Tree] = (),
    ) -> None:
        """Count a finished step and log it where the cadence says so."""
        counters = self.counters
        counters.steps, counters.epoch = step.index, step.epoch
        counters.env_steps += env_steps
        counters.updates += updates
        counters.scored_joint_actions += scored
        counters.sampled_tokens += tokens
        started = time.monotonic()
        if step.index % self.section.logging_steps == 0 or step.index == self.total_steps:
            record = self._record("train", metrics)
            self.logger.log(record)
            if trees:
                self.logger.episodes(record, trees)
        for warning in self._collapse.look(metrics):
            print(f"warning: {warning}", flush=True)
        self._pause = time.monotonic() - started

    def save(self) -> Path | None:
        """Write a checkpoint now; on the main process."""
        assert self.trainer is not None
        tensors = self.trainer.state_tensors()
        if not distributed.is_main():
            return None
        return checkpoint.save(
            self.run_dir,
            self.counters.steps,
            {"loop": asdict(self.counters), "trainer": self.trainer.state()},
            tensors,
            self.section.save_total_limit,
        )

    _pause = 0.0

    def _over(self) -> bool:
        total, most = self.total_steps, self.section.max_env_steps
        return (total is not None and self.counters.steps >= total) or (
            most is not None and self.counters.env_steps >= most
        )

    def _after(self) -> None:
        done, section = self.counters.steps, self.section
        if section.eval_interval and done % section.eval_interval == 0:
            self._evaluate()
        number = self._received()
        if number is not None:
            raise Interrupted(number, self.save())
        if section.save_steps and done % section.save_steps == 0:
            self.save()

    def _evaluate(self) -> None:
        if self.evaluate is None or not self.section.eval_interval:
            return
        trees, metrics = self.evaluate()
        record = self._record("eval", metrics)
        self.logger.log(record)
        self.logger.episodes(record, trees)
        self.counters.eval_end = dict(metrics)
        if self.counters.eval_start is None:
            self.counters.eval_start = dict(metrics)

    def _record(self, phase: Any, metrics: Mapping[str, float]) -> LogRecord:
        counters = self.counters
        return LogRecord(counters.env_steps, counters.updates, counters.epoch, phase, metrics)

    def _received(self) -> int | None:
        """The signal that any process has received, or None."""
        return max(distributed.everyone(self._signal or 0)) or None

    def _signals(self) -> Any:
        return _Handlers(self)


class _Handlers:
    """SIGINT and SIGTERM end the run after its step; the second one leaves at once."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self.receive)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: Any) -> None:
        print(f"\n{signal.Signals(number).name}: finishing this step, then saving", flush=True)
        self.loop._signal = number
        signal.signal(number, signal.SIG_DFL)


class Collapse:
    """Notices a policy that falls off a cliff: entropy or reward far below its recent level."""

    def __init__(self, memory: float = 0.9, share: float = 0.1) -> None:
        self.memory, self.share = memory, share
        self.level: dict[str, float] = {}
        self.seen = 0
        self.told: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings that this step's metrics give cause for; each once a run."""
        self.seen += 1
        warnings = []
        for name in ("entropy", "reward_mean"):
            value = metrics.get(name)
            if value is None:
                continue
            level = self.level.get(name, value)
            if self.seen > 5 and level > 0 and value < self.share * level and name not in self.told:
                self.told.add(name)
                warnings.append(
                    f"{name} fell to {value:.3g} from about {level:.3g}: the policy may have "
                    "collapsed; a lower learning_rate or a kl_coef > 0 may help"
                )
            self.level[name] = self.memory * level + (1 - self.memory) * value
        return warnings
