"""Charts for papers and READMEs, drawn by matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from comlrl.files import replace
from comlrl.loggers.report.chart import DASHES, Chart, stacked

COLOURS = ("#2f6fde", "#dd6b20", "#1b9e77", "#8e4ec6", "#c99700", "#d6409f", "#6a8f1f", "#7b8794")
STYLES = ("-", "--", ":", "-.")
COLUMN = (3.4, 2.6)  # of a paper; inches
LEGEND_LETTERS, LEGEND_LINE = 130, 0.17  # of a line of a common legend; inches
PAPER: dict[Any, Any] = {
    "font.size": 8,
    "pdf.fonttype": 42,
    "lines.linewidth": 1.2,
}  # 42: letters stay letters


def draw(axis: Axes, chart: Chart) -> None:
    """Draw a chart of lines or areas, with a dotted line at the range's upper end, if any."""
    assert chart.kind in ("lines", "stacked"), f"svg.py alone draws {chart.kind}"
    if chart.kind == "stacked":
        named = set()
        for part, base, edge in stacked(chart.series):
            text = "" if part.label in named else part.label  # "": not in the legend
            colour = style(part.colour)["color"]
            axis.fill_between(
                part.xs_X, base, edge, color=colour, alpha=0.85, linewidth=0, label=text
            )
            named.add(part.label)
    for series in chart.series if chart.kind == "lines" else ():
        xs, ys, look = series.xs_X, series.ys_X, style(series.colour)
        if series.faint:
            axis.plot(xs, ys, **look, alpha=0.3, linewidth=0.8)
            continue
        marker = "o" if series.dots else None
        axis.plot(xs, ys, **look, marker=marker, markersize=3.5, label=series.label)
        if len(series.low_X):
            axis.fill_between(xs, series.low_X, series.high_X, color=look["color"], alpha=0.13)
    low, high = chart.y_range
    if chart.percent:
        low, high = -0.02, 1.02  # a line at 0% is whole
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif high is not None:
        axis.axhline(high, color="#7b8794", linewidth=0.8, linestyle=":")
        low = axis.get_ylim()[0] if low is None else low
        high += 0.03 * (high - low)
    axis.set_ylim(low, high)
    axis.set_title(chart.title, fontsize=10)
    axis.set_xlabel(chart.x_label)


def style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of a line."""
    dashes = STYLES[number // len(COLOURS) % DASHES]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}


def write_figures(charts: Mapping[str, Chart], folder: str | Path) -> list[Path]:
    """Write each chart as ``NAME.pdf`` and ``NAME.png``, at the width of a paper's column."""
    folder, written = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in charts.items():
        with rc_context(PAPER):
            figure = Figure(figsize=COLUMN, layout="constrained")
            axis = figure.subplots()
            draw(axis, chart)
            axis.set(ylabel=chart.title, title="")
            plain(axis)
            texts = axis.get_legend_handles_labels()[1]
            if len(texts) > 1:
                across = 1 if max(map(len, texts)) > 20 else 3
                figure.legend(loc="outside lower center", frameon=False, fontsize=7, ncols=across)
                figure.set_figheight(COLUMN[1] + 0.14 * math.ceil(len(texts) / across))
            for file in (folder / f"{name}.pdf", folder / f"{name}.png"):
                figure.savefig(file, dpi=300)
                written.append(file)
    return written


def write_curves(charts: Sequence[Chart], path: str | Path) -> None:
    """Write charts side by side, each with its legend, as a picture."""
    count = max(len(charts), 1)
    figure = Figure(figsize=(13 * count / 3, 4.4), layout="constrained")
    for axis, chart in zip(figure.subplots(1, count, squeeze=False)[0], charts, strict=False):
        draw(axis, chart)
        plain(axis)
        if axis.get_legend_handles_labels()[0]:
            place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
            axis.legend(**place, frameon=False, fontsize=8, ncols=3, columnspacing=1.2)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    replace(path, drawn.getvalue())


def write_side_by_side(
    charts: Sequence[Chart], labels: Sequence[str], paths: Sequence[Path]
) -> None:
    """Write charts of the same series with one legend, which has ``labels``."""
    labels = ["\n".join(textwrap.wrap(label, LEGEND_LETTERS)) for label in labels]
    lines = sum(1 + label.count("\n") for label in labels)
    figure = Figure(figsize=(9, 4.0 + LEGEND_LINE * lines), layout="constrained")
    axes = figure.subplots(1, max(len(charts), 1), squeeze=False)[0]
    for axis, chart in zip(axes, charts, strict=False):
        draw(axis, chart)
        plain(axis)
    swatches = [Line2D([], [], **style(i)) for i in range(len(labels))]
    figure.legend(swatches, labels, loc="outside lower left", frameon=False, fontsize=8, ncols=1)
    for path in paths:
        figure.savefig(path, dpi=200)


def plain(axis: Axes) -> None:
    """Remove the top and right frame, and add a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
