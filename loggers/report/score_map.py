"""A scorecard as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from comlrl.evaluation.scorecard import Entry


def write_score_map(
    path: Path,
    entries: Mapping[tuple[str, str], Entry],
    algorithms: Sequence[str],
    tasks: Sequence[str],
) -> None:
    """Write the picture; cells without a score are blank."""
    size = (2.6 + 0.95 * len(tasks), 1.6 + 0.45 * len(algorithms))
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    means = [[_mean(entries.get((name, task))) for task in tasks] for name in algorithms]
    image = axis.imshow(means, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, values in enumerate(means):
        for column, value in enumerate(values):
            known = value == value
            ink = "black" if not known or value > 0.5 else "white"
            text = f"{value:.2f}" if known else "—"
            axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right", fontsize=8)
    axis.set_yticks(range(len(algorithms)), algorithms, fontsize=8)
    axis.set_title("Score: 0 is the floor, 1 the optimum", fontsize=10)
    axis.spines[:].set_visible(False)
    figure.colorbar(image, shrink=0.8)
    figure.savefig(path, dpi=150)


def _mean(entry: Entry | None) -> float:
    return float("nan") if entry is None or entry.mean is None else entry.mean
