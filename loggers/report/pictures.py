"""Drawing of charts with matplotlib: as inline SVG for pages, as files for papers and READMEs."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from comlrl.files import replace
from comlrl.loggers.report.chart import Chart, Series, thinned

COLOURS = ("#2f6fde", "#dd6b20", "#1b9e77", "#8e4ec6", "#c99700", "#d6409f", "#6a8f1f", "#7b8794")
STYLES = ("-", "--", ":", "-.")
BETTER, WORSE, SAME = COLOURS[2], COLOURS[1], COLOURS[7]
NARROW, WIDE, COLUMN = (3.5, 2.1), (9.6, 3.0), (3.4, 2.8)  # inches; COLUMN: a paper's column
LEFT, RIGHT, BOTTOM, TOP = 0.5, 0.12, 0.4, 0.15  # margins in pages, inches
LEGEND_LETTERS, LEGEND_LINE = 120, 0.17  # shared legend: letters per line, line height in inches
PAPER: dict[Any, Any] = {
    "axes.formatter.limits": (-3, 5),
    "font.size": 8,
    "grid.color": "#e1e6ec",
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # embed fonts, so that text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "comlrl",  # makes files reproducible
    "text.parse_math": False,  # names of runs and rewards may contain dollar signs
}
INK, FONT = "#5d6b7c", "DejaVu Sans"
INKS = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
PAGE = PAPER | dict.fromkeys(INKS, INK)
PAGE |= {"font.family": FONT, "xtick.bottom": False, "ytick.left": False}
# The page's colour scheme sets these.
IN_PAGE = {INK: "var(--soft)", PAPER["grid.color"]: "var(--line)"}
IN_PAGE |= {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS, 1)}
UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def svg(chart: Chart, size: tuple[float, float] = NARROW) -> str:
    """Return a chart as SVG for a page, which adds title and legend and sets the colours.

    The marks of each compared setting have its number as ``data-s``.
    """
    (width, height), drawn = size, io.StringIO()
    with rc_context(PAGE | {"svg.hashsalt": f"{chart.title} {size}"}):  # unique ids on a page
        figure = Figure(figsize=size)
        figure.subplots_adjust(LEFT / width, BOTTOM / height, 1 - RIGHT / width, 1 - TOP / height)
        draw(figure.subplots(), chart)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn.getvalue(), flags=re.S)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r' (d|x|y)="([^"]*)"', _shortened, body.replace("xlink:href", "href"))
    body = re.sub(r' id="setting(\d+)"', r' data-s="\1"', body)
    unused = r' id="[A-Za-z][\w.]*_\d+"| transform="rotate\(-0 [^"]*"|(?<=>)\s+(?=<)'
    body = re.sub(unused, "", body).replace(f"font-family: '{FONT}'; ", "")
    for colour, variable in IN_PAGE.items():
        body = body.replace(colour, variable)
    box = f'viewBox="0 0 {72 * width:g} {72 * height:g}"'
    return f'<svg {box} role="img" aria-label="{escape(chart.title)}">{body.strip()}'


def _shortened(attribute: re.Match[str]) -> str:
    """Return an attribute's coordinates with one decimal, on one line."""
    numbers = re.sub(r"(\.\d)\d+", r"\1", " ".join(attribute[2].split()))
    return f' {attribute[1]}="{numbers}"'


def draw(axis: Axes, chart: Chart) -> None:
    """Draw a chart, with a dotted line at the upper end of its range, if any."""
    kinds = {"lines": _lines, "stacked": _areas, "change": _changes, "bars": _bars, "dots": _dots}
    kinds[chart.kind](axis, chart.series)
    (low, high), (bottom, top) = chart.y_range, axis.get_ylim()
    if chart.percent:
        low, high = -0.02, 1.02  # so that a line at 0% is visible
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        if high is not None and chart.kind == "lines":
            axis.axhline(high, color=COLOURS[-1], linewidth=0.8, linestyle=":")
        low = max(bottom, 0.0) if low is None and axis.dataLim.y0 >= 0 else low
        if high is not None:
            edge = 0.03 * (high - (bottom if low is None else low))
            high += edge
            low = low - edge if low is not None and chart.kind == "change" else low
        if top >= 1e4:
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    if (bottom if low is None else low) != (top if high is None else high):
        axis.set_ylim(low, high)
    if chart.kind == "change":
        axis.set_xticks([])
        axis.margins(x=0.02)
    elif chart.kind in ("lines", "stacked"):
        ticks = 10 if axis.bbox.width > 500 else 6
        axis.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=True))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.margins(x=0.02)
    axis.set_xlabel(chart.x_label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(axis="y", linewidth=0.6)


def style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of a line."""
    dashes = STYLES[number // len(COLOURS) % len(STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}


def _lines(axis: Axes, lines: Sequence[Series]) -> None:
    for line in map(thinned, lines):
        xs, ys, look, gid = line.xs_X, line.ys_X, style(line.colour), f"setting{line.colour}"
        if line.faint:
            axis.plot(xs, ys, **look, alpha=0.3, linewidth=0.8, gid=gid)
            continue
        marker = "o" if line.dots or len(xs) == 1 else None
        axis.plot(xs, ys, **look, marker=marker, markersize=3.5, label=line.label, gid=gid)
        if len(line.low_X):
            band = {"color": look["color"], "alpha": 0.13, "linewidth": 0, "gid": gid}
            axis.fill_between(xs, line.low_X, line.high_X, **band)


def _areas(axis: Axes, parts: Sequence[Series]) -> None:
    """Stack the parts on both sides of 0."""
    edges: dict[int, Any] = {1: 0.0, -1: 0.0}
    for part in map(thinned, parts):
        label, colour = part.label, style(part.colour)["color"]
        for sign, base in edges.items():
            signed = sign * np.maximum(sign * np.asarray(part.ys_X), 0.0)
            if signed.any():
                look = {"color": colour, "alpha": 0.85, "linewidth": 0, "label": label}
                axis.fill_between(part.xs_X, base, base + signed, **look)
                label = ""  # one legend entry per part
            edges[sign] = base + signed


def _changes(axis: Axes, series: Sequence[Series]) -> None:
    """Draw a hollow dot for before, a solid one for after, and a line between them."""
    before, after = series
    pairs = list(zip(before.ys_X, after.ys_X, strict=True))
    colours = [BETTER if new > old else WORSE if new < old else SAME for old, new in pairs]
    size = min(4.0, 600 / len(pairs)) ** 2
    axis.vlines(before.xs_X, before.ys_X, after.ys_X, colors=colours, alpha=0.55)
    axis.scatter(before.xs_X, before.ys_X, size, facecolors="none", edgecolors=colours)
    axis.scatter(after.xs_X, after.ys_X, size, c=colours)


def _bars(axis: Axes, series: Sequence[Series]) -> None:
    (counts,) = series
    widths = 0.95 * np.diff(counts.xs_X)
    axis.bar(counts.xs_X[:-1], counts.ys_X, widths, align="edge", color=COLOURS[0])


def _dots(axis: Axes, groups: Sequence[Series]) -> None:
    for group in groups:
        opacity, colour = 0.15 + 0.85 * np.asarray(group.opacity_X), style(group.colour)["color"]
        look = {"color": colour, "alpha": opacity, "linewidths": 0, "label": group.label}
        axis.scatter(group.xs_X, group.ys_X, 10, **look)


def write_charts(charts: Sequence[Chart], *paths: Path, labels: Sequence[str] = ()) -> list[Path]:
    """Write charts side by side, each as wide as a paper's column, into files of any matplotlib
    format. Each chart has its legend, or with ``labels`` all share one."""
    count = max(len(charts), 1)
    labels = ["\n".join(textwrap.wrap(label, LEGEND_LETTERS)) for label in labels]
    below = LEGEND_LINE * sum(1 + label.count("\n") for label in labels)
    with rc_context(PAPER):
        figure = Figure(figsize=(COLUMN[0] * count, COLUMN[1] + below), layout="constrained")
        for axis, chart in zip(figure.subplots(1, count, squeeze=False)[0], charts, strict=False):
            draw(axis, chart)
            axis.set_title(chart.title)
            if not labels and len(axis.get_legend_handles_labels()[0]) > 1:
                place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
                axis.legend(**place, frameon=False, fontsize=7, ncols=2, columnspacing=1.2)
        if labels:
            swatches = [Line2D([], [], **style(i)) for i in range(len(labels))]
            figure.legend(swatches, labels, loc="outside lower left", frameon=False)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(figure, path, dpi=300)
    return list(paths)


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure atomically, in the format of the path's suffix."""
    drawn, metadata = io.BytesIO(), UNDATED.get(path.suffix)
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi, metadata=metadata)
    replace(path, drawn.getvalue())
