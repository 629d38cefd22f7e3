"""SHPPO's latent networks, a few weights each."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from comlrl.models.latent_networks import SIZES, WEIGHTS, HeterogeneousPolicy
from comlrl.run_files import HETEROGENEOUS

WIDTH, LATENT, HIDDEN, RANK = 32, 4, 12, 3


def policy(seed: int = 0, *, started: bool = True) -> HeterogeneousPolicy:
    """``started``: with a B that is not zero any more."""
    torch.manual_seed(seed)
    made = HeterogeneousPolicy(WIDTH, LATENT, HIDDEN, RANK)
    if started:
        torch.nn.init.normal_(made.layer.B.weight)
    return made


def saved_policy(folder: Path) -> HeterogeneousPolicy:
    """What ``HeterogeneousPolicy.save`` wrote, by its plain files."""
    files = folder / HETEROGENEOUS
    made = HeterogeneousPolicy(**json.loads((files / SIZES).read_text()))
    made.load_state_dict(load_file(str(files / WEIGHTS)))
    return made
