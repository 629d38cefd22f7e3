"""The parts of a run: an algorithm, and its parts that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Union, runtime_checkable

from comlrl.config.algorithms import CommonConfig
from comlrl.types import RolloutResult, Sampling, Shape, Task

if TYPE_CHECKING:
    import torch

    from comlrl.loop.steps import Rolled, Step
    from comlrl.tasks.prompts import Prompts


Credit = TypeVar("Credit")


class Stateful(Protocol):
    """A part that saves and restores its state as tensors."""

    def state_tensors(self) -> Mapping[str, torch.Tensor]: ...

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None: ...


Part = Union[Stateful, "torch.nn.Module"]  # of what a checkpoint holds; a file each


class HasParts(Protocol):
    """A trainer whose parts a checkpoint stores."""

    def parts(self) -> Mapping[str, Part]:
        """Return all that training changes, by the names of its files in a checkpoint."""


class Trainer(HasParts, Protocol):
    """An algorithm, as a train script builds it."""

    def train(self) -> None: ...


@runtime_checkable
class InRounds(HasParts, Protocol):
    """A trainer that labels candidates of the present policies round by round."""

    def begin_round(self, index: int) -> None:
        """Prepare a round; called before its first step, and where a run is resumed."""


class Player(Protocol):
    """A source of a training step's rollouts: trees, or the episodes of a program."""

    seed: int
    sampler: Any
    prompts: Prompts

    @property
    def returns_by_agent(self) -> bool:
        """Return whether each agent has a separate return."""

    def grow(
        self,
        tasks: Sequence[Task],
        shape: Shape,
        sampling: Sampling,
        key: tuple,
        greedy_discount: float | None = None,
    ) -> Sequence[RolloutResult]: ...


@runtime_checkable
class Refilling(Protocol):
    """An algorithm that learns nothing from some tasks, in whose place it samples others."""

    def refilled(
        self, step: Step, trees: Sequence[RolloutResult]
    ) -> tuple[Step, Sequence[RolloutResult]]:
        """Return the step with further tasks, and their rollouts beside those of the step."""


class Algorithm(HasParts, Protocol[Credit]):
    """The algorithm that ``Loop.train`` runs: it credits decisions, and learns from the credit."""

    @property
    def section(self) -> CommonConfig: ...

    @property
    def rollout(self) -> Player: ...

    @property
    def sampling(self) -> Sampling: ...

    def credit(self, rolled: Rolled) -> Credit:
        """Compute what each decision of a step is worth."""

    def learn(self, rolled: Rolled, credit: Credit) -> dict[str, float]:
        """Update the policies; return what is logged, and how many ``updates`` were made. A
        collective call."""
