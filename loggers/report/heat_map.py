"""Heat maps of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from comlrl.loggers.report.pictures import PAPER, save


def write_heat_map(
    path: str | Path,
    rows: Sequence[str],
    columns: Sequence[str],
    matrix: Sequence[Sequence[float]],
    title: str,
    *,
    sides: tuple[str, str] = ("", ""),
    scale: tuple[float, float] | None = None,
) -> None:
    """Write a heat map with the values in its cells, and a dash for NaN.

    ``sides``: titles of the rows and of the columns. ``scale``: the range of the colours; None: the
    least and the greatest value.
    """
    low, high = scale or (float(np.nanmin(matrix)), float(np.nanmax(matrix)))
    size = (2.8 + 0.85 * len(columns), 2.0 + 0.5 * len(rows))
    with rc_context(PAPER):
        figure = Figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        image = axis.imshow(matrix, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        for row, values in enumerate(matrix):
            for column, value in enumerate(values):
                ink = "white" if value < (low + high) / 2 else "black"
                text = "—" if math.isnan(value) else f"{value:.2f}"
                axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
        axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=8)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.set_ylabel(sides[0])
        axis.set_xlabel(sides[1])
        axis.set_title(title, fontsize=10)
        axis.spines[:].set_visible(False)
        figure.colorbar(image, shrink=0.8)
        save(figure, Path(path), dpi=150)
