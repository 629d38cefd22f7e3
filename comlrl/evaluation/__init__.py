"""Trees go in; metrics, pass@k and intervals come out. Beside them what grows trees to compare
with: baselines without training, teams that are crossed, and teams with some agents replaced."""
