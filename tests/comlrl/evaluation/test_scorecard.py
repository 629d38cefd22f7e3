"""Scores, their noise and their spread over seeds, by hand."""

from __future__ import annotations

import math

import pytest

from comlrl.evaluation.scorecard import (
    Outcome,
    cross_play_values,
    entries,
    episode_noise,
    episode_value,
)


def test_an_episode_is_all_of_its_turns():
    metrics = {"reward_mean": 3.0, "turn_1/reward_mean": 1.0, "turn_2/reward_mean": 3.0}
    assert episode_value(metrics, 1) == 3.0
    assert episode_value(metrics, 2) == 4.0


def test_noise_is_the_standard_error_of_the_mean():
    metrics = {"reward_std": 2.0, "turn_1/reward_std": 1.0, "turn_2/reward_std": 2.0}
    assert episode_noise(metrics, 1, 16) == 0.5
    assert episode_noise(metrics, 2, 16) == 0.75


def test_strangers_are_all_pairings_but_a_run_with_itself():
    matrix = [[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [5.0, 6.0, 9.0]]
    # run 0: 0·1 and 1·0, 0·2 and 2·0: (1 + 3 + 2 + 5) / 4
    assert cross_play_values(matrix) == [2.75, 3.5, 4.25]


def test_seeds_are_taken_together():
    outcomes = [
        Outcome("a", "t", 1, score=0.2, noise=0.1),
        Outcome("a", "t", 2, score=0.4, noise=0.3),
        Outcome("b", "t", 1, score=0.5, noise=0.1),
        Outcome("c", "t", 1, reason="no"),
        Outcome("c", "t", 2, reason="no"),
    ]
    found = entries(outcomes)
    assert list(found) == [("a", "t"), ("b", "t"), ("c", "t")]
    both = found["a", "t"]
    assert both.mean == pytest.approx(0.3) and both.noise == pytest.approx(0.2)
    assert both.deviation == pytest.approx(math.sqrt(0.02))  # (0.1² + 0.1²) / (2 − 1)
    assert found["b", "t"].deviation is None
    assert (found["c", "t"].mean, found["c", "t"].reasons) == (None, ("no",))
