"""Baselines worked out by hand; generalized advantage estimation against its sum."""

from __future__ import annotations

import math

import pytest
import torch

from comlrl.credit.advantages import gae, sibling_advantages


def close(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-12)


def test_mean():
    # mean (1 + 2 + 6) / 3 = 3
    assert sibling_advantages([1.0, 2.0, 6.0], "mean") == close([-2.0, -1.0, 3.0])


def test_leave_one_out():
    # others: (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5
    assert sibling_advantages([1.0, 2.0, 6.0], "rloo") == close([-3.0, -1.5, 4.5])


def test_max():
    assert sibling_advantages([1.0, 2.0, 6.0], "max") == close([-5.0, -4.0, 0.0])


def test_greedy():
    assert sibling_advantages([1.0, 2.0, 6.0], "greedy", greedy_return=2.5) == close(
        [-1.5, -0.5, 3.5]
    )


def test_raw():
    assert sibling_advantages([1.0, 2.0], "raw") == [1.0, 2.0]
    assert sibling_advantages([1.5], "raw") == [1.5]


def test_normalization_divides_by_the_siblings_standard_deviation():
    # Squares 4, 1, 9: variance 14 / 3.
    deviation = math.sqrt(14 / 3)
    assert sibling_advantages([1.0, 2.0, 6.0], "mean", normalize=True) == close(
        [-2 / deviation, -1 / deviation, 3 / deviation]
    )
    # The deviation of the returns, whatever the baseline.
    assert sibling_advantages([1.0, 2.0, 6.0], "max", normalize=True)[0] == pytest.approx(
        -5 / deviation
    )


@pytest.mark.parametrize("kind", ["mean", "rloo", "max"])
def test_equal_returns_have_no_advantage_at_all(kind):
    assert sibling_advantages([0.1 + 0.2, 0.3, 0.3], kind, normalize=True) == [0.0, 0.0, 0.0]


def test_handoffs_future_cancels():
    for kind in ("mean", "rloo", "max"):
        assert sibling_advantages([1.0 + 7, 3.0 + 7], kind) == sibling_advantages([1.0, 3.0], kind)


def _sum(rewards, values, discounts, gae_lambda):
    """A_l = Σ_k (Π_{m=l}^{l+k−1} γ_m λ) δ_{l+k}, written out."""
    count = len(rewards)
    deltas = [
        rewards[i] + discounts[i] * (values[i + 1] if i + 1 < count else 0.0) - values[i]
        for i in range(count)
    ]
    return [
        sum(
            deltas[k] * math.prod(discounts[m] * gae_lambda for m in range(start, k))
            for k in range(start, count)
        )
        for start in range(count)
    ]


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_gae_is_its_sum(gae_lambda):
    generator = torch.Generator().manual_seed(0)
    rewards, values, discounts = torch.rand(3, 7, generator=generator, dtype=torch.float64)
    assert gae(rewards, values, discounts, gae_lambda).tolist() == pytest.approx(
        _sum(rewards.tolist(), values.tolist(), discounts.tolist(), gae_lambda)
    )


def test_gae_by_hand():
    # γ = 1 within a turn, 0.5 across to the next, λ = 0.5. V = 1, 2, 4; r = 0, 3, 5.
    # δ_2 = 5 − 4 = 1; δ_1 = 3 + 0.5 · 4 − 2 = 3; δ_0 = 0 + 2 − 1 = 1.
    # A_2 = 1; A_1 = 3 + 0.5 · 0.5 · 1 = 3.25; A_0 = 1 + 1 · 0.5 · 3.25 = 2.625.
    advantages = gae(
        torch.tensor([0.0, 3.0, 5.0]),
        torch.tensor([1.0, 2.0, 4.0]),
        torch.tensor([1.0, 0.5, 1.0]),
        0.5,
    )
    assert advantages.tolist() == [2.625, 3.25, 1.0]
