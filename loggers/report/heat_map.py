"""A square matrix as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def write_heat_map(
    path: str | Path,
    runs: Sequence[str],
    matrix: Sequence[Sequence[float]],
    title: str,
    sides: tuple[str, str],
) -> None:
    """Write a picture: values in the cells. ``sides``: who is of the row's run, and who of the
    column's."""
    count = len(runs)
    figure = Figure(figsize=(3.4 + 0.7 * count, 2.6 + 0.6 * count), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(matrix, cmap="viridis")
    middle = (min(map(min, matrix)) + max(map(max, matrix))) / 2
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            ink = "white" if value < middle else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=9)
    names = [Path(run).name for run in runs]
    axis.set_xticks(range(count), names, rotation=30, ha="right", fontsize=8)
    axis.set_yticks(range(count), names, fontsize=8)
    axis.set_xlabel(f"{sides[1]} of")
    axis.set_ylabel(f"{sides[0]} of")
    axis.set_title(title, fontsize=10)
    axis.spines[:].set_visible(False)
    figure.colorbar(image, shrink=0.8)
    figure.savefig(path, dpi=150)
