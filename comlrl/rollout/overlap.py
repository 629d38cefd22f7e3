"""Grows the next training step's trees in a thread while the present step is updated.

The whole growth runs there: sampling of all turns, rewards and feedback. Its sampler stays with
the policies from before the update, and what it sampled is weighed once the update is through.
Rewards and external modes are not used by two threads at once: an evaluation waits for the growth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from comlrl.processes import distributed
from comlrl.rollout import daemon_threads
from comlrl.rollout.grow import Greedy, Rollout
from comlrl.types import Reward, Sampler, Sampling, Shape, Task, Transition, Tree

_Grown = tuple[list[Tree], Greedy | None]
_How = Callable[[Rollout, Sequence[Task], tuple], _Grown]

PAUSE = 0.2  # seconds between two attempts to end a growth that nobody needs any more


class Holding(Protocol):
    """A sampler whose policies can be held as they are."""

    def hold(self) -> Sampler:
        """What samples by the present policies while they are updated, until the next ``hold`` or
        ``release``. A collective call where models are split."""

    def release(self) -> None: ...

    def leave(self) -> None:
        """Sampling that is under way in other threads raises an error."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A growth in a thread. In lock-step only the first process has one."""

    key: tuple
    grown: Future[_Grown] | None


class OverlappedRollout(Rollout):
    """A rollout whose next trees may be grown beforehand; in lock-step by the first process."""

    def __init__(
        self,
        present: Rollout,
        holding: Holding,
        reward: Reward,
        transition: Transition,
        weigh: Callable[[Sequence[Tree], Sampling], list[Tree]],
    ) -> None:
        """``present``: grows what was not begun beforehand. ``reward``, ``transition``: its own,
        but without collective calls. ``weigh``: gives the completions of older policies their
        weights; a collective call where models are split."""
        super().__init__(
            present.sampler, present.reward, present.transition, present.prompts,
            seed=present.seed, history=present.builder.history, process=present.process,
            own_rewards=present.own_rewards,
        )  # fmt: skip
        self.holding, self.weigh = holding, weigh
        self._alone = present.by(present.sampler, reward, transition)
        self._how: _How | None = None  # the latest step's trees were grown
        self._ahead: _Ahead | None = None

    def grow(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, key: tuple
    ) -> list[Tree]:
        def how(rollout: Rollout, tasks: Sequence[Task], key: tuple) -> _Grown:
            return Rollout.grow(rollout, tasks, shape, sampling, key), None

        return self._grown(how, tasks, sampling, key)[0]

    def grow_with_greedy(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, key: tuple, discount: float
    ) -> tuple[list[Tree], Greedy]:
        def how(rollout: Rollout, tasks: Sequence[Task], key: tuple) -> _Grown:
            return Rollout.grow_with_greedy(rollout, tasks, shape, sampling, key, discount)

        trees, greedy = self._grown(how, tasks, sampling, key)
        assert greedy is not None
        return trees, greedy

    def begin(self, tasks: Sequence[Task], key: tuple) -> None:
        """Begin to grow what will be asked for next, as the latest trees were grown. A collective
        call where models are split. Raises what holding the policies raises."""
        assert self._how is not None and self._ahead is None, "one step ahead, after the first"
        rollout = self._alone.by(self.holding.hold())
        job, grown = partial(self._how, rollout, tasks, key), None
        if distributed.is_main() or not distributed.lock_step():
            (grown,) = daemon_threads.start([job], 1)
        self._ahead = _Ahead(key, grown)

    def release(self) -> None:
        """Nothing is grown beforehand: let go of the policies that were held."""
        self.holding.release()

    def wait(self) -> None:
        """Until nothing is being grown. A collective call where models are split. Raises the error
        that has ended the growth."""
        if self._ahead is not None:
            grown = self._ahead.grown
            distributed.once(lambda: _result(grown) and None)

    def close(self) -> None:
        """End the growth that nobody needs any more; what it scores by now is finished first."""
        grown = None if self._ahead is None else self._ahead.grown
        while grown is not None and not grown.done():
            self.holding.leave()
            wait([grown], PAUSE)

    def _grown(self, how: _How, tasks: Sequence[Task], sampling: Sampling, key: tuple) -> _Grown:
        self._how = how
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return how(self, tasks, key)
        assert ahead.key == key, f"{ahead.key} was begun, and {key} is asked for"
        grown = ahead.grown
        trees, greedy = distributed.once(lambda: _result(grown))
        return self.weigh(trees, sampling), greedy


def _result(grown: Future[_Grown] | None) -> _Grown:
    assert grown is not None, "the first process's in lock-step, or this one's"
    return grown.result()
