"""An agent's latents, which SHPPO keeps from the rollout to the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """SHPPO: who an agent was at one state, kept from the rollout to the update. On the CPU."""

    observation_D: torch.Tensor  # its prompt, pooled
    epsilon_K: torch.Tensor  # standard normal; zeros where sampling was greedy
    value_K: torch.Tensor  # μ + σ ε: the ratios of all epochs use this very one
    mu_K: torch.Tensor
    memory_H: torch.Tensor  # after this turn
