"""SHPPO's latent networks, a few weights each."""

from __future__ import annotations

import torch

from comlrl.models.latent_networks import HeterogeneousPolicy

WIDTH, LATENT, HIDDEN, RANK = 32, 4, 12, 3


def policy(seed: int = 0, *, started: bool = True) -> HeterogeneousPolicy:
    """``started``: with a B that is not zero any more."""
    torch.manual_seed(seed)
    made = HeterogeneousPolicy(WIDTH, LATENT, HIDDEN, RANK)
    if started:
        torch.nn.init.normal_(made.layer.B.weight)
    return made
