"""Metrics, pass@k and intervals of rollouts; and comparisons: baselines without training,
cross-play between runs, and teams with some agents replaced."""
