"""Growth of the next training step's trees, in a thread while the current step is updated.

The thread runs the whole rollout: sampling of all turns, rewards and feedback. It samples from the
policies before the update; completions get importance weights once the update has ended. Rewards
and external modes are never used by two threads at once, so an evaluation waits for the growth. But
several threads use them one after the other, while other code draws from the global random
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
    """A sampler whose current policies can be held during an update."""

    def hold(self) -> Sampler:
        """Return a sampler of the current policies, until the next ``hold`` or ``release``."""

    def release(self) -> None: ...

    def leave(self) -> None:
        """Stop sampling in other threads by raising an error there."""


# Settings of a step's rollout apart from its tasks: shape, sampling and greedy discount.
_Growth = tuple[Shape, Sampling, float | None]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Trees that are growing in a thread."""

    growth: _Growth
    tasks: list[Task]
    key: tuple
    grown: Future[list[Tree]]


class OverlappedRollout:
    """A rollout that can grow the next step's trees in advance."""

    def __init__(
        self,
        present: Rollout,
        holding: Holding,
        transition: Transition,
        weigh: Callable[[Sequence[Tree], Sampling], list[Tree]],
        taken: Callable[[bool], None] = lambda used: None,
    ) -> None:
        """Initialize the rollout.

        ``present``: grows trees that were not begun in advance. ``transition``: the external mode
        for the other thread. ``weigh``: adds importance weights to completions of older policies.
        ``taken``: called when a growth in advance has ended, with whether its trees are used.
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
        """Begin to grow the next trees with the latest settings. Raises errors of ``hold``."""
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
        """Stop a growth that is no longer needed; scores that are being computed finish first."""
        grown = None if self._ahead is None else self._ahead.grown
        while grown is not None and not grown.done():
            self.holding.leave()
            wait([grown], PAUSE)
