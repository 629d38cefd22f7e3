"""AdamW with gradient clipping and a schedule, for one agent.

For half-precision weights the optimizer holds and updates float32 masters, and rounds the weights
from them (mixed-precision training, arXiv 1710.03740). bfloat16 has 8 bits of precision, so a step
of 2e-5 on a weight of 0.02 would be rounded away, and a moment with β₂ = 0.999 would never decay.
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
    """The factor of the learning rate: after a linear warm-up it is constant, or decays with the
    run's progress, from 1 at the first update after the warm-up to 0 at the run's end."""

    def __init__(self, kind: str, warmup: int) -> None:
        """Set up the schedule. ``kind``: ``constant``, ``linear`` or ``cosine``. ``warmup``:
        updates."""
        self.kind, self.warmup = kind, warmup
        self.updates = 0  # made so far
        self.start = 0.0  # progress at the first update after the warm-up

    def factor(self, progress: float) -> float:
        """Return the factor of the next update; ``progress``: the fraction of the run, in [0, 1),
        that is done."""
        if self.updates < self.warmup:
            return (self.updates + 1) / self.warmup
        if self.updates == self.warmup:
            self.start = progress
        if self.kind == "constant":
            return 1.0
        # A resumed run may end later than planned: its progress may then be before ``start``.
        done = max(0.0, (progress - self.start) / (1 - self.start))
        return 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))


class AgentOptimizer:
    """AdamW with gradient-norm clipping and a learning-rate schedule."""

    parameters: list[torch.nn.Parameter]  # of the model
    stepped: list[torch.Tensor]  # each parameter, or its float32 master

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
        """Set up the optimizer. ``agent``: the parameters' agent, named in the error about a
        gradient norm that is not finite."""
        self.agent = agent
        self.parameters = list(parameters)
        self.max_grad_norm, self.peak = max_grad_norm, learning_rate
        self.learning_rate = 0.0  # of the update just made
        self.schedule = Schedule(schedule, warmup)
        self.stepped = [_stepped(parameter) for parameter in self.parameters]
        self.mastered = False  # whether masters have values
        # The fused kernel makes one pass over weights and moments, without copies.
        self.adam = torch.optim.AdamW(
            self.stepped, lr=learning_rate, weight_decay=0.0, fused=True, foreach=False
        )

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, progress: float) -> float:
        """Sum gradients over processes, clip and step; return the norm before clipping.

        ``progress``: the fraction of the run, 0 to 1, before this update. Raises NonFiniteError,
        leaving the weights unchanged, if the norm is not finite.
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
        # A fused step does not increment the version counter, by which servers' adapters are named.
        torch.autograd.graph.increment_version(self.parameters)
        self.schedule.updates += 1
        return norm

    @contextlib.contextmanager
    def _masters(self) -> Iterator[None]:
        """Move the gradients to the masters inside the context; round the weights from the masters
        afterwards."""
        if not self.mastered:  # the weights may have been loaded since construction
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
        self.mastered = False  # older masters would overwrite the loaded weights
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
    """Return the parameter or, in half precision, a master whose values the first update sets."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    # Sum gradients of micro-batches in float32, if this version of torch supports it.
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = torch.float32
    return parameter.detach().float()


def optimizer_of(
    section: CommonConfig,
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    agent: int | None = None,
) -> AgentOptimizer:
    """Build an optimizer with the clipping and schedule of an algorithm's section."""
    return AgentOptimizer(
        list(parameters),
        learning_rate,
        max_grad_norm=section.max_grad_norm,
        schedule=section.lr_scheduler,
        warmup=section.warmup_steps,
        agent=agent,
    )


def policy_optimizer(section: CommonConfig, team: Team, index: int) -> AgentOptimizer:
    """Build the optimizer of an agent's trained parameters."""
    agent = team.agents[index]
    rate = agent.learning_rate or section.learning_rate
    return optimizer_of(section, agent.parameters(), rate, index)
