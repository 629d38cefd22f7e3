"""Trees go in; metrics, pass@k and intervals come out. Beside them what grows trees to compare
with: baselines without training, and teams that are crossed."""
