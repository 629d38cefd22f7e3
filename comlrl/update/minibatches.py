"""Partitions a training step's states or units into minibatches, one for each update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from comlrl.keyed import order
from comlrl.processes.distributed import Deal


@dataclass(frozen=True, slots=True)
class Span:
    """The run's progress, from 0 to 1, before and after a training step."""

    start: float
    end: float

    def at(self, done: int, count: int) -> float:
        """Return the run's progress after ``done`` of the step's ``count`` updates."""
        return self.start + (self.end - self.start) * done / count


def minibatches(
    states_B: Sequence[int], size: int | None, key: tuple, deal: Deal
) -> list[list[int]]:
    """Partition this process's states in an order that depends only on the key.

    ``states_B``: number of states of each of its tasks. ``size``: most states of a minibatch over
    all processes, as in ``like_parts``; None: all. ``deal``: of the step's tasks. Over all
    processes, minibatches are those that a single process would make.
    """
    places, total = deal.positions(states_B)
    state_at = {place: state for state, place in enumerate(places)}
    shuffled = order((*key, 0), total)
    return [
        [state_at[shuffled[i]] for i in part if shuffled[i] in state_at]
        for part in like_parts(total, size)
    ]


@dataclass(frozen=True, slots=True)
class Pass:
    """One epoch over a step's states."""

    number: int  # 1-based
    progress: float  # of the run, before the pass
    minibatches: list[tuple[list[int], float]]  # states, and the run's progress before the update


def passes(
    states_B: Sequence[int],
    size: int | None,
    epochs: int,
    key: tuple,
    span: Span,
    deal: Deal,
) -> Iterator[Pass]:
    """Yield the epochs of a step, each shuffled into different ``minibatches``. The progress of
    epochs that ``target_kl`` skips is skipped too."""
    for epoch in range(epochs):
        chosen = minibatches(states_B, size, (*key, epoch), deal)
        first, count = epoch * len(chosen), epochs * len(chosen)
        yield Pass(
            epoch + 1,
            span.at(epoch, epochs),
            [(states, span.at(first + m, count)) for m, states in enumerate(chosen)],
        )


def like_parts(total: int, size: int | None) -> list[range]:
    """Split ``range(total)`` into the fewest parts of at most ``size`` each (None: one part; none
    if ``total`` is 0). Sizes differ by at most 1: 5 with size 4 is 3 + 2, and 10 with size 3 is
    3 + 2 + 3 + 2."""
    count = -(-total // (size or max(1, total)))
    ends = [-(-total * i // count) for i in range(1, count + 1)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
