"""A training step: its tasks, times and rollouts; and a run's counters."""

from __future__ import annotations

import hashlib
import math
import random
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from comlrl.credit.decisions import Decisions
from comlrl.processes.distributed import Deal
from comlrl.types import RolloutResult, Task
from comlrl.update.minibatches import Span


class Clock:
    """Wall-clock seconds of a training step, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.monotonic()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to ``part``."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Return the seconds until the last lap, or until now if there is none."""
        return (self._last if self.seconds else time.monotonic()) - self._started


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: the tasks whose trees are grown together."""

    index: int  # 1-based
    epoch: int  # 0-based
    tasks: list[Task]
    clock: Clock = field(default_factory=Clock)
    deal: Deal = field(default_factory=Deal)  # of the tasks; empty until they are divided

    @property
    def key(self) -> tuple[str, int]:
        """Return the part of all sampling keys that identifies the step."""
        return "train", self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The rollouts that a training step learns from, of all processes."""

    trees: Sequence[RolloutResult]
    env_steps: int
    scored: int  # number of joint actions
    tokens: int  # number of sampled tokens
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """The rollouts that an algorithm learns from in a training step, in this process."""

    decisions: Decisions
    index: int  # of the step, 1-based
    deal: Deal  # of the step's tasks
    span: Span
    scored: int  # number of joint actions, over all processes


@dataclass(kw_only=True)
class Counters:
    """A run's counters, all of which are stored in checkpoints."""

    steps: int = 0
    epoch: int = 0
    env_steps: int = 0
    updates: int = 0
    scored_joint_actions: int = 0
    tasks_seen: int = 0  # trained on, counting repetitions
    sampled_tokens: int = 0
    train_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    wall_seconds: float = 0.0  # before the run was resumed
    logged: int = 0  # number of lines of metrics.jsonl
    evaluated: int = -1  # number of training steps done at the last evaluation
    eval_start: dict[str, float] | None = None
    eval_end: dict[str, float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # ``Loop.notes``

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Counters:
        """Load the counters of a checkpoint. Raises TypeError or ValueError if they are invalid."""
        counters = cls(**held)
        for name, least in vars(cls()).items():
            value = getattr(counters, name)
            if not isinstance(least, int | float):
                fits = value is None or isinstance(value, dict)
            else:
                fits = type(value) in (int, type(least)) and least <= value < math.inf
            if not fits:
                raise ValueError(f"{name}={value!r}")
        return counters


def seed_generators(seed: int, step: int) -> None:
    """Seed the global generators at each step, equally on all processes, so that dropout and the
    like are reproducible after a resume without stored generator states."""
    step_seed = int(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).hexdigest(), 16)
    torch.manual_seed(step_seed)
    np.random.seed(step_seed)
    random.seed(step_seed)


def peak_memory_mb() -> float:
    """Return the GPU's peak allocation or, without a GPU, the process's peak resident memory; in
    MiB."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
