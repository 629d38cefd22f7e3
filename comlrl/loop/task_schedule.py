"""Which tasks each training step has: shuffled epochs, or rounds of passes over a share of them."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import accumulate

from comlrl.keyed import order
from comlrl.types import Task


@dataclass(frozen=True)
class TaskSchedule:
    """The training steps of a run, ``batch_size`` tasks each, the last of a pass what is left."""

    tasks: Sequence[Task]  # counts alone need no more than their number
    batch_size: int
    epochs: int | None  # passes over the tasks, of each round; None: others end the run
    seed: int
    _: KW_ONLY
    rounds: int = 1
    round_tasks: int | None = None  # of a round; None: all tasks, divided among the rounds
    max_steps: int | None = None  # where ``epochs`` is None, what the rounds are parts of

    @cached_property
    def size(self) -> int:
        """Return the most tasks of a round."""
        count = len(self.tasks)
        return min(count, self.round_tasks or math.ceil(count / self.rounds))

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of the tasks, in order."""
        digest = hashlib.sha256()
        for task in self.tasks:
            digest.update(repr((task.task_id, sorted(task.fields.items()))).encode())
        return digest.hexdigest()

    @property
    def steps(self) -> int | None:
        """Count the steps of the schedule; None where it has no end."""
        return None if self.epochs is None else self._ends[-1]

    def tasks_of(self, round_index: int) -> list[Task]:
        """Return the tasks of a round: ``size`` of a shuffled pass over all of them, and of the
        next pass after that; a pass's last round takes what is left."""
        count, size = len(self.tasks), self.size
        cycle, part = divmod(round_index, math.ceil(count / size))
        shuffled = order((self.seed, "rounds", cycle), count)
        return [self.tasks[i] for i in sorted(shuffled[part * size : (part + 1) * size])]

    def round_of(self, step: int) -> int:
        """Return the round (0-based) that a step (0-based) is in; one after the last is of the
        last."""
        return min(bisect_right(self._ends, step), self.rounds - 1)

    def start_of(self, round_index: int) -> int:
        """Count the steps before a round's first."""
        return self._ends[round_index - 1] if round_index else 0

    def end_of(self, round_index: int) -> int:
        """Count the steps up to the end of a round."""
        return self._ends[round_index]

    def at(self, step: int) -> tuple[int, list[Task]]:
        """Return the epoch (a pass, counted over all rounds) and the tasks of a step; all
        0-based."""
        index = self.round_of(step)
        tasks = self.tasks_of(index)
        part, parts = self.part_of(step)
        within = step - self.start_of(index)
        epoch = self._passes[index] + within // parts
        chosen = order((self.seed, "epoch", epoch), len(tasks))
        chosen = chosen[part * self.batch_size : (part + 1) * self.batch_size]
        return epoch, [tasks[i] for i in chosen]

    def spares(self, step: int) -> list[Task]:
        """Return the tasks of a step's (0-based) round that the step does not have, shuffled."""
        tasks, present = self.tasks_of(self.round_of(step)), self.at(step)[1]
        names = {task.task_id for task in present}
        shuffled = (tasks[i] for i in order((self.seed, "refill", step), len(tasks)))
        return [task for task in shuffled if task.task_id not in names]

    def part_of(self, step: int) -> tuple[int, int]:
        """Return a step's index in its pass (0-based), and the number of steps in the pass."""
        index = self.round_of(step)
        parts = self._parts(index)
        return (step - self.start_of(index)) % parts, parts

    def length_of(self, round_index: int) -> int:
        """Count the tasks of a round."""
        return self._lengths[round_index]

    def _parts(self, round_index: int) -> int:
        """Count the steps of a pass over a round's tasks."""
        return math.ceil(self._lengths[round_index] / self.batch_size)

    @cached_property
    def _passes(self) -> list[int]:
        """Count the passes begun before each round. One that ``max_steps`` breaks off counts
        too, so that no two rounds share an epoch, by which their tasks are shuffled."""
        of_each = (
            math.ceil((self.end_of(r) - self.start_of(r)) / self._parts(r))
            for r in range(self.rounds)
        )
        return list(accumulate(of_each, initial=0))

    @cached_property
    def _ends(self) -> list[int]:
        """Count the steps up to the end of each round."""
        if self.epochs is None:
            total = self.max_steps or 0
            return [total * (r + 1) // self.rounds for r in range(self.rounds)]
        passes = self.epochs
        return list(accumulate(passes * self._parts(r) for r in range(self.rounds)))

    @cached_property
    def _lengths(self) -> list[int]:
        count, size = len(self.tasks), self.size
        cycle = math.ceil(count / size)
        return [min(size, count - size * (r % cycle)) for r in range(self.rounds)]
