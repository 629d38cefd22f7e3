"""Confidence intervals of means by resampling (percentile bootstrap)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def bootstrap_interval(
    value_B: Sequence[float] | np.ndarray, weight_B: np.ndarray | None = None, seed: int = 0
) -> tuple[float, float]:
    """Compute the 95% interval of a weighted mean over tasks, seeds, …; shapes (B,). It has no
    width if B is 1."""
    value_B = np.asarray(value_B, dtype=float)
    weight_B = np.ones(len(value_B)) if weight_B is None else weight_B
    generator = np.random.default_rng(seed % 2**64)  # a run's seed may be negative
    drawn = generator.integers(len(value_B), size=(RESAMPLES, len(value_B)))
    mass = weight_B[drawn].sum(1)
    sums = (value_B * weight_B)[drawn].sum(1)
    low, high = np.percentile(sums[mass > 0] / mass[mass > 0], (2.5, 97.5))
    return float(low), float(high)
