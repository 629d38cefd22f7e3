"""The tasks of each training step: shuffled epochs, or rounds of passes over parts of the tasks."""

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
    """The training steps of a run, each of ``batch_size`` tasks, or fewer at the end of a pass."""

    tasks: Sequence[Task]  # methods that only count use just their number
    batch_size: int
    epochs: int | None  # passes over the tasks of each round; None: another limit ends the run
    seed: int
    _: KW_ONLY
    rounds: int = 1
    round_tasks: int | None = None  # tasks of a round; None: all, divided among the rounds
    max_steps: int | None = None  # divided among the rounds if ``epochs`` is None

    @cached_property
    def size(self) -> int:
        """Return the largest number of tasks in a round."""
        count = len(self.tasks)
        return min(count, self.round_tasks or math.ceil(count / self.rounds))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the tasks, in order."""
        digest = hashlib.sha256()
        for task in self.tasks:
            digest.update(repr((task.task_id, sorted(task.fields.items()))).encode())
        return digest.hexdigest()

    @property
    def steps(self) -> int | None:
        """Return the number of steps of the schedule; None if it has no end."""
        return None if self.epochs is None else self._ends[-1]

    def tasks_of(self, round_index: int) -> list[Task]:
        """Return the tasks of a round. Rounds take the next ``size`` tasks, or all that are left,
        of a shuffled pass over all tasks; after its last task a new pass begins."""
        count, size = len(self.tasks), self.size
        cycle, part = divmod(round_index, math.ceil(count / size))
        shuffled = order((self.seed, "rounds", cycle), count)
        return [self.tasks[i] for i in sorted(shuffled[part * size : (part + 1) * size])]

    def round_of(self, step: int) -> int:
        """Return the round of a step, both 0-based; steps after the last round belong to it."""
        return min(bisect_right(self._ends, step), self.rounds - 1)

    def start_of(self, round_index: int) -> int:
        """Return the number of steps before a round."""
        return self._ends[round_index - 1] if round_index else 0

    def end_of(self, round_index: int) -> int:
        """Return the number of steps up to the end of a round."""
        return self._ends[round_index]

    def at(self, step: int) -> tuple[int, list[Task]]:
        """Return the epoch (passes, counted over all rounds) and the tasks of a step; both step
        and epoch are 0-based."""
        index = self.round_of(step)
        tasks = self.tasks_of(index)
        part, parts = self.part_of(step)
        within = step - self.start_of(index)
        epoch = self._passes[index] + within // parts
        chosen = order((self.seed, "epoch", epoch), len(tasks))
        chosen = chosen[part * self.batch_size : (part + 1) * self.batch_size]
        return epoch, [tasks[i] for i in chosen]

    def spares(self, step: int) -> list[Task]:
        """Return the other tasks of a step's round, shuffled; ``step`` is 0-based."""
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
        """Return the number of tasks of a round."""
        return self._lengths[round_index]

    def _parts(self, round_index: int) -> int:
        """Return the number of steps of a pass over a round's tasks."""
        return math.ceil(self._lengths[round_index] / self.batch_size)

    @cached_property
    def _passes(self) -> list[int]:
        """The number of passes begun before each round. Incomplete passes count, so that no two
        rounds share an epoch, which is the key of their shuffling."""
        of_each = (
            math.ceil((self.end_of(r) - self.start_of(r)) / self._parts(r))
            for r in range(self.rounds)
        )
        return list(accumulate(of_each, initial=0))

    @cached_property
    def _ends(self) -> list[int]:
        """The number of steps up to the end of each round."""
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
