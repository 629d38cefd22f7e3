"""Advantages from siblings' returns, and generalized advantage estimation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from comlrl.credit.returns import mean


def sibling_advantages(
    returns_G: Sequence[float],
    kind: str,
    *,
    normalize: bool = False,
    greedy_return: float | None = None,
) -> list[float]:
    """Compute the advantage of each of an agent's G completions at one node.

    ``mean``: A_g = R_g − mean(R). ``rloo``: R_g − mean of the others. ``max``: R_g − max(R).
    ``greedy``: R_g − the return of a greedy rollout (ReMax). ``raw``: R_g (REINFORCE).
    ``normalize`` divides by the standard deviation of the siblings' returns, unless it is 0.
    """
    returns = list(returns_G)
    count = len(returns)
    if kind == "mean":
        advantages = [r - mean(returns) for r in returns]
    elif kind == "rloo":
        advantages = [r - (sum(returns) - r) / (count - 1) for r in returns]
    elif kind == "max":
        advantages = [r - max(returns) for r in returns]
    elif kind == "greedy":
        assert greedy_return is not None
        advantages = [r - greedy_return for r in returns]
    else:
        assert kind == "raw"
        advantages = returns
    if normalize:
        deviation = math.sqrt(mean([(r - mean(returns)) ** 2 for r in returns]))
        if deviation > 1e-8:
            advantages = [a / deviation for a in advantages]
    # Remove rounding errors, so that completions with equal returns are skipped in the update.
    return [0.0 if abs(a) < 1e-9 else a for a in advantages]


def gae(
    rewards_L: torch.Tensor, values_L: torch.Tensor, discounts_L: torch.Tensor, gae_lambda: float
) -> torch.Tensor:
    """Compute generalized advantage estimates along one chain (Schulman et al. 2016, eq. 16).

        δ_l = r_l + γ_l · V_{l+1} − V_l,   A_l = δ_l + γ_l λ A_{l+1}

    ``discounts_L[l]`` is γ between l and l + 1; V and A after the last entry are 0, as a chain ends
    with its task. All tensors are of shape (L,); the result carries no gradient.
    """
    rewards, values = rewards_L.tolist(), values_L.tolist()  # floats are faster in a scalar loop
    advantages, discounts = [0.0] * len(values), discounts_L.tolist()
    following = following_value = 0.0
    for index in range(len(values) - 1, -1, -1):
        delta = rewards[index] + discounts[index] * following_value - values[index]
        following = delta + discounts[index] * gae_lambda * following
        advantages[index] = following
        following_value = values[index]
    return torch.tensor(advantages, dtype=values_L.dtype, device=values_L.device)
