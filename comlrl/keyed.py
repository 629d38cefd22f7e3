"""Randomness from keys: what is drawn depends on what asks, never on what was drawn before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Key = tuple[Any, ...]


def uniforms(key: Key, count: int) -> np.ndarray:
    """Return ``count`` numbers in [0, 1) that depend on the key alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.random.Generator(philox).random(count)


def normals(key: Key, count: int) -> torch.Tensor:
    """Return ``count`` standard normals that depend on the key alone: inverse CDF of uniforms."""
    import torch  # what answers at once needs the orders alone

    middle = uniforms((*key, "normal"), count).clip(1e-12, 1 - 1e-12)
    return torch.special.ndtri(torch.from_numpy(middle)).float()


def order(key: Key, count: int) -> list[int]:
    """Return a permutation of ``range(count)`` that depends on the key alone."""
    return [int(i) for i in np.argsort(uniforms(key, count), kind="stable")]
