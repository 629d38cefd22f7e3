"""Exact worth of completions against its definition, and rank correlations by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from benchmarks.exact_worth import enumerated, rank_correlation, worth

POLICIES = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.25, 0.25, 0.5]])


def reward(action: tuple[int, ...]) -> float:
    a, b, c = action
    return float(a * b - c + 2 * (a == c))


def test_the_expected_reward_is_a_sum_over_joint_actions():
    total = sum(
        reward(action) * math.prod(POLICIES[i, a] for i, a in enumerate(action))
        for action in itertools.product(range(3), repeat=3)
    )
    assert float(enumerated(reward)(POLICIES)) == pytest.approx(total)
    certain = np.eye(3)[[2, 1, 0]]
    both = enumerated(reward)(np.stack([POLICIES, certain]))
    assert both == pytest.approx([total, reward((2, 1, 0))])


def test_difference_reward_replaces_one_agent_and_leaves_the_others():
    found = worth((2, 1, 0), POLICIES, enumerated(reward))
    replaced = sum(p * reward((a, 1, 0)) for a, p in enumerate(POLICIES[0]))
    assert found.difference[0] == pytest.approx(reward((2, 1, 0)) - replaced)


def test_shapley_values_sum_to_what_all_completions_add():
    expected = enumerated(reward)
    found = worth((2, 1, 0), POLICIES, expected)
    assert found.shapley.sum() == pytest.approx(reward((2, 1, 0)) - float(expected(POLICIES)))


def test_the_advantage_is_the_mean_difference_reward_over_the_partners():
    found = worth((2, 1, 0), POLICIES, enumerated(reward))
    mean = sum(
        POLICIES[1, b]
        * POLICIES[2, c]
        * worth((2, b, c), POLICIES, enumerated(reward)).difference[0]
        for b, c in itertools.product(range(3), repeat=2)
    )
    assert found.advantage[0] == pytest.approx(mean)


def test_rank_correlation():
    assert rank_correlation([1, 2, 3], [10, 20, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # d = ranks' differences 0, 1, −1, 0: 1 − 6 · 2 / (4 · 15)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    # ranks 1.5, 1.5, 3 and 1, 2, 3: Pearson of those is √3 / 2
    assert rank_correlation([5, 5, 9], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
