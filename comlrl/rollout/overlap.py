"""Grows the next training step's trees in a thread while the present step is updated.

The whole growth runs there: sampling of all turns, rewards and feedback. Its sampler stays with
the policies from before the update, and what it sampled is weighed once the update is through.
Rewards and external modes are not used by two threads at once: an evaluation waits for the growth.
But they are used by several, one after the other, while other code draws from the global random
generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from comlrl.rollout import daemon_threads
from comlrl.rollout.grow import Rollout
from comlrl.types import Sampler, Sampling, Shape, Task, Transition, Tree

PAUSE = 0.2  # seconds between two attempts to end a growth that is no longer needed


class Holding(Protocol):
    """A sampler whose policies can be held as they are."""

    def hold(self) -> Sampler:
        """Return a sampler of the present policies while they are updated. It lasts until the
        next ``hold`` or ``release``."""

    def release(self) -> None: ...

    def leave(self) -> None:
        """Stop sampling in other threads by raising an error there."""


# Shape, sampling and the greedy discount: what a step's trees are grown with, whatever its tasks
_Growth = tuple[Shape, Sampling, float | None]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A growth in a thread."""

    growth: _Growth
    tasks: list[Task]
    key: tuple
    grown: Future[list[Tree]]


class OverlappedRollout:
    """A rollout whose next trees may be grown beforehand."""

    def __init__(
        self,
        present: Rollout,
        holding: Holding,
        transition: Transition,
        weigh: Callable[[Sequence[Tree], Sampling], list[Tree]],
        taken: Callable[[bool], None] = lambda used: None,
    ) -> None:
        """Initialize the rollout.

        ``present``: grows what was not begun in advance. ``transition``: for another thread.
        ``weigh``: gives the completions of older policies their weights. ``taken``: is called once
        nothing is growing in advance any more, with whether the trees are used.
        """
        self.present, self.sampler, self.prompts = present, present.sampler, present.prompts
        self.seed, self.returns_by_agent = present.seed, present.returns_by_agent
        self.grow_each = present.grow_each
        self.holding, self.weigh, self.taken = holding, weigh, taken
        self._of_thread = present.by(present.sampler, transition)
        self._latest: _Growth | None = None
        self._ahead: _Ahead | None = None

    def grow(
        self,
        tasks: Sequence[Task],
        shape: Shape,
        sampling: Sampling,
        key: tuple,
        greedy_discount: float | None = None,
    ) -> list[Tree]:
        """Return the trees grown in advance, or new ones if these do not match."""
        self._latest = growth = (shape, sampling, greedy_discount)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if (ahead.growth, ahead.tasks, ahead.key) == (growth, list(tasks), key):
                trees = ahead.grown.result()
                self.taken(True)
                return self.weigh(trees, sampling)
            ahead.grown.result()
            self.taken(False)
        return self.present.grow(tasks, shape, sampling, key, greedy_discount)

    def begin(self, tasks: Sequence[Task], key: tuple) -> None:
        """Begin to grow the next trees with the settings of the latest ones. Raises the errors of
        holding the policies."""
        assert self._latest is not None and self._ahead is None, "one step ahead, after the first"
        rollout = self._of_thread.by(self.holding.hold())
        shape, sampling, discount = self._latest
        job = partial(rollout.grow, tasks, shape, sampling, key, discount)
        self._ahead = _Ahead(self._latest, list(tasks), key, daemon_threads.start(job))

    def release(self) -> None:
        """Release the policies that were held; nothing is growing in advance."""
        self.holding.release()

    def wait(self) -> None:
        """Wait until nothing is growing. Raises the error that has ended the growth."""
        if self._ahead is not None:
            self._ahead.grown.result()

    def close(self) -> None:
        """End the growth that is no longer needed, after the scores that are being computed."""
        grown = None if self._ahead is None else self._ahead.grown
        while grown is not None and not grown.done():
            self.holding.leave()
            wait([grown], PAUSE)
