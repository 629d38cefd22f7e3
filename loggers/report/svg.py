"""Charts as SVG text: no script needed to read them, colours from the page's CSS.

A chart is drawn at the size of a phone's column, so that its letters are never scaled down; wide
ones come in two widths. Colours are ``var(--c1)`` … ``var(--c8)``; the page defines them for
light and dark.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from comlrl.loggers.report.chart import COLOURS, DASHES, Chart, Series, average, stacked

NARROW, WIDE, HEIGHT, WIDE_HEIGHT = 400, 960, 230, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 30
EDGE = 4  # around the axes, so that dots on them are whole
MAX_POINTS = 300  # of a line; more are averaged in bins


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Data coordinates → pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int = NARROW
    height: int = HEIGHT
    percent: bool = False

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return LEFT + (value - self.x_low) / span * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return self.height - BOTTOM - (value - self.y_low) / span * (self.height - TOP - BOTTOM)

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))


def drawings(chart: Chart) -> tuple[str, ...]:
    """Return the chart in one width, or in narrow and wide versions if it is wide."""
    of_steps = chart.kind in ("lines", "stacked")
    series = [_thinned(s) for s in chart.series] if of_steps else list(chart.series)
    frame = _frame(chart, series)
    wide = dataclasses.replace(frame, width=WIDE, height=WIDE_HEIGHT)
    found = []
    for sized in (frame, wide) if chart.wide else (frame,):
        if chart.kind == "lines":
            marks = [*(_band(sized, s) for s in series), *(_line(sized, s) for s in series)]
        elif chart.kind == "stacked":
            marks = _areas(sized, series)
        elif chart.kind == "change":
            marks = _changes(sized, chart.names, *series)
        elif chart.kind == "bars":
            marks = _bars(sized, *series)
        else:
            marks = [_dots(sized, s) for s in series]
        hover = _hover(sized, series, chart.kind == "stacked") if of_steps else ""
        found.append(_svg(chart, sized, "".join(marks), hover))
    return tuple(found)


def _svg(chart: Chart, frame: Frame, marks: str, hover: str) -> str:
    """Return the drawing as SVG. ``hover``: the attribute with the data of a zoomable chart.

    The marks of such a chart are a drawing inside the drawing, whose ``viewBox`` the page's script
    moves.
    """
    if hover:
        x, y = LEFT - EDGE, TOP - EDGE
        size = (frame.width - RIGHT + EDGE - x, frame.height - BOTTOM + EDGE - y)
        box = 'x="{0}" y="{1}" width="{2}" height="{3}" viewBox="{0} {1} {2} {3}"'
        box = box.format(x, y, *size)
        marks = f'<svg class="plot" {box} preserveAspectRatio="none">{marks}</svg>'
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(chart.title)}"{hover}>'
        f"{_axes(frame, chart.x_label, chart.kind != 'change')}{marks}</svg>"
    )


def _frame(chart: Chart, series: Sequence[Series]) -> Frame:
    xs = [x for s in series for x in s.xs_X]
    x_low, x_high = min(xs), max(xs)
    ys = [y for s in series for y in (*s.ys_X, *s.low_X, *s.high_X)]
    low, high = chart.y_range
    if chart.kind == "stacked":
        ys = [0.0, *(y for _, _, edge in stacked(series) for y in edge)]
        low = min(ys)
    elif chart.kind == "dots":
        x_low, x_high = _padded(x_low, x_high)
    elif chart.kind == "change":
        x_low, x_high = x_low - 0.5, x_high + 0.5
    lowest, highest = _padded(min(ys), max(ys))
    low, high = (lowest if low is None else low), (highest if high is None else high)
    if chart.percent:
        low, high = 0.0, 1.0
    return Frame(
        x_low=x_low,
        x_high=x_high,
        y_low=low,
        y_high=high if high > low else low + 1.0,
        percent=chart.percent,
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers between low and high."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float, percent: bool = False) -> str:
    """Return a tick's text: 20%, 1.5k, 2M, 0.25, 3e-05."""
    if percent:
        return f"{value * 100:.4g}%"
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.2g}" if 0 < size < 1e-3 else f"{value:.4g}"


def _thinned(series: Series) -> Series:
    count = len(series.xs_X)
    if count <= MAX_POINTS:
        return series
    edges = [i * count // MAX_POINTS for i in range(MAX_POINTS + 1)]

    def binned(values: Sequence[float]) -> list[float]:
        return [average(values[a:b]) for a, b in itertools.pairwise(edges)] if len(values) else []

    return dataclasses.replace(
        series,
        xs_X=binned(series.xs_X),
        ys_X=binned(series.ys_X),
        low_X=binned(series.low_X),
        high_X=binned(series.high_X),
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    padded = low - margin
    return (0.0 if low >= 0 > padded else padded), high + margin


def _axes(frame: Frame, x_label: str, x_ticks: bool) -> str:
    marks = []
    right, floor = frame.width - RIGHT, frame.height - BOTTOM
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        marks.append(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="ytick" x="{LEFT - 6}" y="{y + 3.5:.1f}">'
            f"{label(value, frame.percent)}</text>"
        )
    count = 8 if frame.width == WIDE else 4
    for value in ticks(frame.x_low, frame.x_high, count) if x_ticks else ():
        x = min(max(frame.x(value), LEFT + 4), right - 10)
        marks.append(f'<text class="xtick" x="{x:.1f}" y="{floor + 13}">{label(value)}</text>')
    middle = (LEFT + right) / 2
    return (
        f'<g class="ticks">{"".join(marks)}</g>'
        f'<text class="xlabel" x="{middle}" y="{frame.height - 4}">{x_label}</text>'
        f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    )


def _band(frame: Frame, series: Series) -> str:
    if not len(series.low_X):
        return ""
    lows = [max(y, frame.y_low) for y in series.low_X]
    highs = [min(y, frame.y_high) for y in series.high_X]
    xs = list(series.xs_X)
    band = frame.points([*xs, *reversed(xs)], [*highs, *reversed(lows)])
    return (
        f'<polygon class="band f{series.colour % COLOURS + 1}" data-s="{series.colour}" '
        f'points="{band}"/>'
    )


def _line(frame: Frame, series: Series) -> str:
    kind = f"s{series.colour % COLOURS + 1}" + (" faint" if series.faint else "")
    dashes = f" d{series.colour // COLOURS % DASHES}" if series.colour >= COLOURS else ""
    ys = [min(max(y, frame.y_low), frame.y_high) for y in series.ys_X]
    marks = []
    if len(ys) > 1:
        points = frame.points(series.xs_X, ys)
        marks.append(
            f'<polyline class="line {kind}{dashes}" data-s="{series.colour}" points="{points}"/>'
        )
    if series.dots or len(ys) == 1:
        for x, y in zip(series.xs_X, ys, strict=True):
            marks.append(  # a line without length: round at any zoom
                f'<path class="dot {kind}" data-s="{series.colour}" '
                f'd="M{frame.x(x):.1f} {frame.y(y):.1f}h0"/>'
            )
    return "".join(marks)


def _areas(frame: Frame, parts: Sequence[Series]) -> list[str]:
    marks = []
    for part, base, edge in stacked(parts):
        xs = list(part.xs_X)
        points = frame.points([*xs, *reversed(xs)], [*edge, *reversed(base)])
        marks.append(f'<polygon class="area f{part.colour % COLOURS + 1}" points="{points}"/>')
    return marks


def _changes(frame: Frame, names: Sequence[str], before: Series, after: Series) -> list[str]:
    """Return marks for each name: a hollow dot, a full one and a line between."""
    marks = []
    radius = max(1.5, min(4.0, (frame.width - LEFT - RIGHT) / len(names) / 2.5))
    for at, name, old, new in zip(before.xs_X, names, before.ys_X, after.ys_X, strict=True):
        x, y0, y1 = frame.x(at), frame.y(old), frame.y(new)
        way = "better" if new > old else "worse" if new < old else "same"
        marks.append(
            f'<g class="{way}"><title>{escape(name)}: {old:.2f} → {new:.2f}</title>'
            f'<line class="change" x1="{x:.1f}" x2="{x:.1f}" y1="{y0:.1f}" y2="{y1:.1f}"/>'
            f'<circle class="before" cx="{x:.1f}" cy="{y0:.1f}" r="{radius:.1f}"/>'
            f'<circle class="after" cx="{x:.1f}" cy="{y1:.1f}" r="{radius:.1f}"/></g>'
        )
    return marks


def _bars(frame: Frame, counts: Series) -> list[str]:
    marks = []
    for (left, right), count in zip(itertools.pairwise(counts.xs_X), counts.ys_X, strict=True):
        x0, x1, y = frame.x(left), frame.x(right), frame.y(count)
        marks.append(
            f'<rect class="f1" x="{x0 + 0.5:.1f}" y="{y:.1f}" width="{max(x1 - x0 - 1, 1):.1f}" '
            f'height="{frame.y(0) - y:.1f}"><title>{count:g}</title></rect>'
        )
    return marks


def _dots(frame: Frame, group: Series) -> str:
    return "".join(
        f'<circle class="f{group.colour % COLOURS + 1}" cx="{frame.x(x):.1f}" '
        f'cy="{frame.y(y):.1f}" r="3.5" opacity="{0.15 + 0.85 * opacity:.2f}"/>'
        for x, y, opacity in zip(group.xs_X, group.ys_X, group.opacity_X, strict=True)
    )


def _hover(frame: Frame, series: Iterable[Series], stacked: bool) -> str:
    """Return the data with which the page's script shows values under the pointer and zooms."""
    data = {
        "x": [frame.x_low, frame.x_high],
        "y": [frame.y_low, frame.y_high],
        "px": [LEFT, frame.width - RIGHT],
        "py": [TOP, frame.height - BOTTOM],
        "percent": frame.percent,
        "stacked": stacked,
        "series": [
            {
                "label": s.label,
                "colour": s.colour % COLOURS + 1,
                "s": s.colour,
                "x": [round(float(x), 1) for x in s.xs_X],
                "y": [float(f"{y:.4g}") for y in s.ys_X],
            }
            for s in series
            if not s.faint
        ],
    }
    return f' data-hover="{escape(json.dumps(data, separators=(",", ":")))}"'
