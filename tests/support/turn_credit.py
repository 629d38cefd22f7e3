"""GAE over the turns of chains whose states have a value each."""

from __future__ import annotations

import torch

from comlrl.update.per_token import PerToken, advantages_of
from tests.support.plain_chains import Chains


def by_number(value_C: torch.Tensor) -> PerToken:
    """One number for all tokens of completion c = 0 … C − 1."""
    numbers = PerToken()
    numbers.of_completion.update(enumerate(value_C.split(1)))
    return numbers


def turn_credit(
    chains: Chains, value_S: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of joint actions, (C,) each, by the team's reward."""
    values = by_number(value_S[list(chains.state_C)])
    advantage, returns = advantages_of(
        chains.chains, lambda c: chains.reward_C[c], values, None,
        gamma_token=1.0, discount=discount, gae_lambda=gae_lambda,
    )  # fmt: skip
    return advantage.flat(), returns.flat()
