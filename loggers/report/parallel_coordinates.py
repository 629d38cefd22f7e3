"""The points of a sweep as lines over parallel axes: its parameters, then the metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def write_parallel_coordinates(
    path: str | Path,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    metric: Sequence[float],
    metric_name: str,
    log: Collection[str] = (),
) -> None:
    """Write a picture; a line's colour is its metric. ``log``: parameters on a log scale."""
    columns = [[point[name] for point in points] for name in names] + [list(metric)]
    titles = [*names, metric_name]
    figure = Figure(figsize=(2.2 + 1.9 * len(columns), 4.2), layout="constrained")
    axis = figure.subplots()
    heights = []
    for x, (title, column) in enumerate(zip(titles, columns, strict=True)):
        at, ticks = _scale(column, title in log)
        heights.append(at)
        _draw_axis(axis, x, title, ticks)
    shade = colormaps["viridis"]
    low, high = min(metric), max(metric)
    for i in sorted(range(len(metric)), key=metric.__getitem__):
        share = (metric[i] - low) / (high - low) if high > low else 1.0
        ys = [column[i] for column in heights]
        axis.plot(range(len(columns)), ys, color=shade(share), linewidth=1.6, alpha=0.85)
    axis.set_xlim(-0.3, len(columns) - 0.5)
    axis.set_ylim(-0.06, 1.12)
    axis.axis("off")
    figure.savefig(path, dpi=150)


def _draw_axis(axis: Axes, x: int, title: str, ticks: Sequence[tuple[float, str]]) -> None:
    axis.plot([x, x], [0, 1], color="#7b8794", linewidth=1)
    axis.text(x, 1.08, title, ha="center", fontsize=8, weight="bold")
    for y, text in ticks:
        axis.plot([x - 0.02, x], [y, y], color="#7b8794", linewidth=1)
        axis.text(x - 0.04, y, text, ha="right", va="center", fontsize=7)


def _scale(column: Sequence[Any], log: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """Return (height of each value in [0, 1], ticks); texts are spaced evenly, in numeric order."""
    if any(isinstance(value, str) for value in column):
        choices = sorted(set(column), key=_order)
        places = {
            c: i / (len(choices) - 1) if len(choices) > 1 else 0.5 for i, c in enumerate(choices)
        }
        return [places[value] for value in column], [(y, c) for c, y in places.items()]
    moved = [math.log(value) if log else float(value) for value in column]
    low, high = min(moved), max(moved)
    if high == low:
        return [0.5] * len(moved), [(0.5, f"{column[0]:.3g}")]
    steps = [low + (high - low) * i / 4 for i in range(5)]
    ticks = [(i / 4, f"{math.exp(v) if log else v:.3g}") for i, v in enumerate(steps)]
    return [(value - low) / (high - low) for value in moved], ticks


def _order(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text
