"""AdamW with its own clip and schedule, for one agent.

Weights of half precision are rounded copies of float32 masters that the optimizer holds and steps
(mixed-precision training, arXiv 1710.03740): bfloat16 has 8 bits, so that a step of 2e-5 on a
weight of 0.02 would be rounded away, and a moment with β₂ = 0.999 would never fall.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from comlrl.config.algorithms import CommonConfig
from comlrl.errors import NonFiniteError
from comlrl.models.team import Team
from comlrl.processes import distributed

MASTER = "master"  # the name of a float32 master among a weight's moments in a checkpoint


class Schedule:
    """Factor of the learning rate: a linear warm-up, then constant, or with the run's progress to
    0: it is 1 at the first update after the warm-up and comes to its end as the run does."""

    def __init__(self, kind: str, warmup: int) -> None:
        """Set up the schedule. ``kind``: ``constant``, ``linear`` or ``cosine``. ``warmup``:
        updates."""
        self.kind, self.warmup = kind, warmup
        self.updates = 0  # made so far
        self.start = 0.0  # progress at the first update after the warm-up

    def factor(self, progress: float) -> float:
        """Return the factor of the next update; ``progress``: the part of the run, in [0, 1),
        before it."""
        if self.updates < self.warmup:
            return (self.updates + 1) / self.warmup
        if self.updates == self.warmup:
            self.start = progress
        if self.kind == "constant":
            return 1.0
        # A resumed run may have been given a later end, which is later than the warm-up's end.
        done = max(0.0, (progress - self.start) / (1 - self.start))
        return 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))


class AgentOptimizer:
    """AdamW with its own gradient-norm clip and learning-rate schedule."""

    parameters: list[torch.nn.Parameter]  # what the model computes with
    stepped: list[torch.Tensor]  # of each: itself, or its float32 master

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
        """Set up the optimizer. ``agent``: whose parameters they are, for the error of a norm
        that is not finite. ``processes``: over which gradients are summed."""
        self.agent = agent
        self.parameters = list(parameters)
        self.max_grad_norm, self.peak = max_grad_norm, learning_rate
        self.learning_rate = 0.0  # of the update just made
        self.schedule = Schedule(schedule, warmup)
        self.stepped = [_stepped(parameter) for parameter in self.parameters]
        self.mastered = False  # whether masters have values
        # One pass over all that a weight has, and no copies of it.
        self.adam = torch.optim.AdamW(
            self.stepped, lr=learning_rate, weight_decay=0.0, fused=True, foreach=False
        )

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, progress: float) -> float:
        """Sum gradients over processes, clip and step; return the norm before clipping.

        ``progress``: the part of the run, 0 to 1, that lies before this update. Raises
        NonFiniteError, with the weights untouched, where the norm is not finite.
        """
        distributed.add_gradients(self.parameters)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            self.zero()
            raise NonFiniteError(f"the gradient's norm is {norm}", agent=self.agent)
        if norm > self.max_grad_norm:
            torch._foreach_mul_(gradients, self.max_grad_norm / (norm + 1e-6))
        self.learning_rate = self.peak * self.schedule.factor(progress)
        for group in self.adam.param_groups:
            group["lr"] = self.learning_rate
        with self._masters():
            self.adam.step()
        # A fused step is not counted as a change, and servers' adapters are named by that count.
        torch.autograd.graph.increment_version(self.parameters)
        self.schedule.updates += 1
        return norm

    @contextlib.contextmanager
    def _masters(self) -> Iterator[None]:
        """Give the masters the gradients inside the context; round the weights from the masters
        afterwards."""
        if not self.mastered:  # what the first update starts from may have come from a file
            for parameter, master in self._pairs:
                master.copy_(parameter.detach())
        self.mastered = True
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        yield
        for parameter, master in self._pairs:
            parameter.detach().copy_(master)
            master.grad = None

    @property
    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        pairs = zip(self.parameters, self.stepped, strict=True)
        return [(parameter, stepped) for parameter, stepped in pairs if stepped is not parameter]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            "updates": torch.tensor(self.schedule.updates),
            "start": torch.tensor(self.schedule.start, dtype=torch.float64),
        }
        if self.mastered:
            for index, stepped in enumerate(self.stepped):
                if stepped is not self.parameters[index]:
                    tensors[f"{index}.{MASTER}"] = stepped
        for index, state in self.adam.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"{index}.{name}"] = torch.as_tensor(value)
        return tensors

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.schedule.updates = int(tensors["updates"])
        self.schedule.start = float(tensors["start"])
        self.mastered = False  # masters of other weights would undo what was loaded with these
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            index, dot, name = key.partition(".")
            if dot:
                if name == MASTER:
                    self.mastered = True
                    self.stepped[int(index)].copy_(value)
                else:
                    state.setdefault(int(index), {})[name] = value
        adam_state = self.adam.state_dict()
        adam_state["state"] = state
        self.adam.load_state_dict(adam_state)


def _stepped(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the parameter, or its master, whose values are set by the first update."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    # Micro-batches are summed in float32, where this torch can.
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = torch.float32
    return parameter.detach().float()


def optimizer_of(
    section: CommonConfig,
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    agent: int | None = None,
) -> AgentOptimizer:
    """Build an optimizer with the clip and the schedule of an algorithm's section."""
    return AgentOptimizer(
        list(parameters),
        learning_rate,
        max_grad_norm=section.max_grad_norm,
        schedule=section.lr_scheduler,
        warmup=section.warmup_steps,
        agent=agent,
    )


def policy_optimizer(section: CommonConfig, team: Team, index: int) -> AgentOptimizer:
    """Build an optimizer of what an agent's policy trains."""
    agent = team.agents[index]
    rate = agent.learning_rate or section.learning_rate
    return optimizer_of(section, agent.parameters(), rate, index)
