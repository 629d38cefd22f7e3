"""AdamW with its own clip and schedule, for one agent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from comlrl.processes import distributed, sharding
from comlrl.types import NonFiniteError


class Schedule:
    """Factor of the learning rate: a linear warm-up, then constant, or with the run's progress to
    0: it is 1 at the first update behind the warm-up and comes to its end as the run does."""

    def __init__(self, kind: str, warmup: int) -> None:
        """``kind``: ``constant``, ``linear`` or ``cosine``. ``warmup``: updates."""
        self.kind, self.warmup = kind, warmup
        self.updates = 0  # made so far
        self.start = 0.0  # progress at the first update behind the warm-up

    def factor(self, progress: float) -> float:
        """Of the update to be made; ``progress``: the part of the run, in [0, 1), before it."""
        if self.updates < self.warmup:
            return (self.updates + 1) / self.warmup
        if self.updates == self.warmup:
            self.start = progress
        if self.kind == "constant":
            return 1.0
        # A resumed run may have been given a later end, which lies behind the warm-up's.
        done = max(0.0, (progress - self.start) / (1 - self.start))
        return 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))


class AgentOptimizer:
    """AdamW with its own gradient-norm clip and learning-rate schedule."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        learning_rate: float,
        *,
        max_grad_norm: float,
        schedule: str = "constant",
        warmup: int = 0,
        agent: int | None = None,
    ) -> None:
        """``agent``: whose parameters they are, for the error of a norm that is no number."""
        self.agent = agent
        self.parameters = list(parameters)
        self.max_grad_norm, self.peak = max_grad_norm, learning_rate
        self.learning_rate = 0.0  # of the update just made
        self.schedule = Schedule(schedule, warmup)
        # One pass over all that a weight has, and no copies of it; not where some tensors are
        # split over processes and others are whole.
        whole = not any(map(sharding.is_split, self.parameters))
        self.adam = torch.optim.AdamW(
            self.parameters, lr=learning_rate, weight_decay=0.0, fused=whole, foreach=False
        )

    def zero(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def step(self, progress: float) -> float:
        """Sum gradients over processes, clip, step; returns the norm before clipping.

        ``progress``: the part of the run, 0 to 1, that lies before this update. Raises
        NonFiniteError, with the weights untouched, where the norm is no number.
        """
        distributed.add_gradients(self.parameters)
        norm = float(sharding.gradient_norm(self.parameters))
        if not math.isfinite(norm):
            self.zero()
            raise NonFiniteError(f"the gradient's norm is {norm}", agent=self.agent)
        if norm > self.max_grad_norm:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.max_grad_norm / (norm + 1e-6))
        self.learning_rate = self.peak * self.schedule.factor(progress)
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate
        self.adam.step()
        self.schedule.updates += 1
        return norm

    def state_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            "updates": torch.tensor(self.schedule.updates),
            "start": torch.tensor(self.schedule.start, dtype=torch.float64),
        }
        for index, state in self.adam.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"{index}.{name}"] = sharding.stored(torch.as_tensor(value))
        return tensors

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.schedule.updates = int(tensors["updates"])
        self.schedule.start = float(tensors["start"])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            index, dot, name = key.partition(".")
            if dot:
                if value.dim():
                    value = sharding.like(value, self.parameters[int(index)])
                state.setdefault(int(index), {})[name] = value
        whole = self.adam.state_dict()
        whole["state"] = state
        self.adam.load_state_dict(whole)


def optimizer_of(
    section: Any,
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    agent: int | None = None,
) -> AgentOptimizer:
    """An optimizer with the clip and the schedule of an algorithm's section."""
    return AgentOptimizer(
        list(parameters),
        learning_rate,
        max_grad_norm=section.max_grad_norm,
        schedule=section.lr_scheduler,
        warmup=section.warmup_steps,
        agent=agent,
    )
