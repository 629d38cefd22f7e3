"""Interfaces of algorithms, and of their parts that checkpoints store."""

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


Part = Union[Stateful, "torch.nn.Module"]  # each is a file of a checkpoint


class HasParts(Protocol):
    """A trainer whose parts a checkpoint stores."""

    def parts(self) -> Mapping[str, Part]:
        """Return everything that training changes, by the names of the checkpoint's files."""


class Trainer(HasParts, Protocol):
    """An algorithm, built by a training script."""

    def train(self) -> None: ...


@runtime_checkable
class InRounds(HasParts, Protocol):
    """A trainer that labels candidates of the current policies in each round."""

    def begin_round(self, index: int) -> None:
        """Prepare a round; called before its first step, and when a run resumes within it."""


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
    """An algorithm that replaces tasks from which it learns nothing by others."""

    def refilled(
        self, step: Step, trees: Sequence[RolloutResult]
    ) -> tuple[Step, Sequence[RolloutResult]]:
        """Return the step with additional tasks, and the rollouts of all its tasks."""


class Algorithm(HasParts, Protocol[Credit]):
    """An algorithm for ``Loop.train``, which credits decisions and learns from the credit."""

    @property
    def section(self) -> CommonConfig: ...

    @property
    def rollout(self) -> Player: ...

    @property
    def sampling(self) -> Sampling: ...

    def credit(self, rolled: Rolled) -> Credit:
        """Compute the credit of each decision of a step."""

    def learn(self, rolled: Rolled, credit: Credit) -> dict[str, float]:
        """Update the policies; return metrics, including the number of ``updates``. A collective
        call."""
