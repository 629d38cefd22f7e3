"""Slow and obvious versions, and how near a fast one comes to them."""

from __future__ import annotations

import numpy as np
import torch

from comlrl.types import Sampling


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert b.norm() > 0
    return float((a - b).norm() / b.norm())


def truncated(p: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The largest ``top_k`` probabilities, of these the fewest that hold ``top_p`` of the mass."""
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    support = ranked[: sampling.top_k]
    mass, total = 0.0, sum(p[token] for token in support)
    chosen = []
    for token in support:
        if sampling.top_p is not None and mass >= sampling.top_p * total:
            break
        chosen.append(token)
        mass += p[token]
    return np.array([p[token] if token in chosen else 0.0 for token in range(len(p))])
