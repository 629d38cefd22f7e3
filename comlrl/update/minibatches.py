"""A step's states or nodes → the parts that each make an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from comlrl.keyed import order
from comlrl.processes.distributed import Deal


@dataclass(frozen=True, slots=True)
class Span:
    """A training step's part of the run: the progress, 0 to 1, before and after it."""

    start: float
    end: float

    def at(self, done: int, count: int) -> float:
        """Return the progress before the next of a step's ``count`` updates, ``done`` of them
        made."""
        return self.start + (self.end - self.start) * done / count


def minibatches(
    states_B: Sequence[int], size: int | None, key: tuple, deal: Deal
) -> list[list[int]]:
    """Partition this process's states in an order that depends on the key alone.

    ``states_B``: states of each of its trees. ``size``: states in a minibatch over all processes
    at most, as in ``like_parts``; None: all of them. ``deal``: of the step's tasks. Every process
    gets its part of the minibatches that one process alone would make.
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
    """Return the epochs of a step, each with separate ``minibatches``. Epochs that ``target_kl``
    leaves out take their part of the schedule with them."""
    for epoch in range(epochs):
        chosen = minibatches(states_B, size, (*key, epoch), deal)
        first, count = epoch * len(chosen), epochs * len(chosen)
        yield Pass(
            epoch + 1,
            span.at(epoch, epochs),
            [(states, span.at(first + m, count)) for m, states in enumerate(chosen)],
        )


def like_parts(total: int, size: int | None) -> list[range]:
    """Split ``range(total)`` into as few parts as hold at most ``size`` each (None: one); none
    where there is nothing. Sizes differ by 1 at most: 5 at 4 are 3 + 2, and 10 at 3 are 3 + 2 +
    3 + 2."""
    count = -(-total // (size or max(1, total)))
    ends = [-(-total * i // count) for i in range(1, count + 1)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
