"""Gradients that trainers' optimizers are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from comlrl.config.algorithms import MAGRPOConfig
from comlrl.credit.decisions import decisions_of
from comlrl.loop.steps import Rolled
from comlrl.models.team import Team
from comlrl.processes.distributed import Deal
from comlrl.trainers.magrpo import MAGRPOTrainer
from comlrl.types import Sampling, Tree
from comlrl.update.minibatches import Span
from comlrl.update.optimizer import AgentOptimizer

SAMPLING = Sampling(0.8, 16)


def kept(
    optimizers: Iterable[AgentOptimizer], steps: bool = False
) -> dict[int, list[list[torch.Tensor | None]]]:
    """The gradients of each agent's parameters, at each step of its optimizer from now on; the
    step itself is made where ``steps`` says so."""
    found: dict[int, list[list[torch.Tensor | None]]] = {}
    for optimizer in optimizers:

        def step(progress: float, optimizer=optimizer, made=optimizer.step) -> float:
            gradients = [None if p.grad is None else p.grad.clone() for p in optimizer.parameters]
            found.setdefault(optimizer.agent, []).append(gradients)
            return made(progress) if steps else 0.0

        optimizer.step = step  # type: ignore[method-assign]
    return found


def fast(
    agents: Team,
    section: MAGRPOConfig,
    trees: Sequence[Tree],
    move: float = 0.0,
    sampling: Sampling = SAMPLING,
) -> list[list[torch.Tensor]]:
    """Each agent's gradient at each optimizer step, as the trainer makes them; a step goes
    ``move`` far against it."""
    found: list[list[torch.Tensor]] = [[] for _ in agents.agents]

    class Recorder:
        learning_rate = 0.0

        def __init__(self, agent) -> None:
            self.agent, self.parameters = agent, list(agent.parameters())

        def zero(self) -> None:
            for parameter in self.agent.parameters():
                parameter.grad = None

        def step(self, progress: float) -> float:
            gradient = flat(self.agent)
            found[self.agent.index].append(gradient)
            if move:  # else a gradient of 0 is one, too
                shift(self.agent, -move * gradient / gradient.norm())
            self.zero()
            return 0.0

    trainer = MAGRPOTrainer(section, agents, None, None, sampling)  # type: ignore[arg-type]
    trainer.optimizers = [Recorder(agent) for agent in agents.agents]  # type: ignore[misc]
    decisions = decisions_of(trees, section.discount)
    deal = Deal((0,) * len(trees))
    rolled = Rolled(decisions=decisions, index=1, deal=deal, span=Span(0.0, 1.0), scored=0)
    trainer.learn(rolled, trainer.credit(rolled))
    return found


def flat(agent) -> torch.Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().double()
            for p in agent.parameters()
        ]
    )


@torch.no_grad()
def shift(agent, by: torch.Tensor) -> None:
    """Add to an agent's weights, flat as its gradients are."""
    sizes = [p.numel() for p in agent.parameters()]
    for parameter, part in zip(agent.parameters(), by.split(sizes), strict=True):
        parameter.add_(part.view_as(parameter))
