"""Keyed randomness: a draw depends only on its key, never on earlier draws."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Key = tuple[Any, ...]


def uniforms(key: Key, count: int) -> np.ndarray:
    """Return ``count`` uniform numbers in [0, 1) that depend only on the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"))
    return np.random.Generator(philox).random(count)


def normals(key: Key, count: int) -> torch.Tensor:
    """Return ``count`` standard normals that depend only on the key: inverse CDF of uniforms."""
    import torch  # imported here: fast commands need only ``order``

    middle = uniforms((*key, "normal"), count).clip(1e-12, 1 - 1e-12)
    return torch.special.ndtri(torch.from_numpy(middle)).float()


def order(key: Key, count: int) -> list[int]:
    """Return a permutation of ``range(count)`` that depends only on the key."""
    return [int(i) for i in np.argsort(uniforms(key, count), kind="stable")]
