"""Parallel coordinates: a sweep's points as lines across axes of its parameters and metric."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

from comlrl.loggers.report.pictures import PAPER, SAME, save


def write_parallel_coordinates(
    path: str | Path,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    metric: Sequence[float],
    metric_name: str,
    log: Collection[str] = (),
) -> None:
    """Write the picture; lines are coloured by metric. ``log``: parameters on a log scale."""
    columns = [(name, [point[name] for point in points]) for name in names]
    columns.append((metric_name, list(metric)))
    with rc_context(PAPER):
        figure = Figure(figsize=(2.2 + 1.9 * len(columns), 4.2), layout="constrained")
        axis = figure.subplots()
        heights = []
        for x, (title, column) in enumerate(columns):
            places, ticks = _scale(column, title in log)
            heights.append(places)
            axis.plot([x, x], [0, 1], color=SAME, linewidth=1)
            axis.text(x, 1.08, title, ha="center", weight="bold")
            for y, text in ticks:
                axis.plot([x - 0.02, x], [y, y], color=SAME, linewidth=1)
                axis.text(x - 0.04, y, text, ha="right", va="center", fontsize=7)
        shares = _scale(metric, log=False)[0]
        for i in np.argsort(metric):
            look = {"color": colormaps["viridis"](shares[i]), "linewidth": 1.6, "alpha": 0.85}
            axis.plot([column[i] for column in heights], **look)
        axis.set(xlim=(-0.3, len(columns) - 0.5), ylim=(-0.06, 1.12))
        axis.axis("off")
        save(figure, Path(path), dpi=150)


def _scale(column: Sequence[Any], log: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """Return (height of each value in [0, 1], ticks); strings are evenly spaced, in numeric
    order."""
    if any(isinstance(value, str) for value in column):
        texts = sorted({str(value) for value in column}, key=_order)
        places = [float(texts.index(str(value))) for value in column]
        ticks = [(float(i), text) for i, text in enumerate(texts)]
    else:
        places = [float(np.log(value)) if log else float(value) for value in column]
        steps = np.unique(np.linspace(min(places), max(places), 5)).tolist()
        ticks = [(step, f"{np.exp(step) if log else step:.3g}") for step in steps]
    low, high = min(places), max(places)

    def height(place: float) -> float:
        return (place - low) / (high - low) if high > low else 0.5

    return [height(place) for place in places], [(height(y), text) for y, text in ticks]


def _order(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text
