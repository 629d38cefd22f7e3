"""Small charts as SVG text: no script needed to read them, colours from the page's CSS.

A chart is drawn at the size of a phone's column, so that its letters are never scaled down; wide
ones come in two widths. Colours are ``var(--c1)`` … ``var(--c8)``; the page defines them for
light and dark.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

NARROW, WIDE, HEIGHT = 400, 960, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 30
EDGE = 4  # around the axes, so that dots on them are whole
COLOURS, DASHES = 8, 4  # further lines repeat the colours, dashed in so many ways
BLUE, ORANGE, GREEN, PURPLE, YELLOW, PINK, OLIVE, GREY = range(COLOURS)
MAX_POINTS = 300  # of a line; more are averaged in bins


@dataclass(frozen=True, slots=True)
class Series:
    """One line; ``low_X``/``high_X`` draw a band around it."""

    label: str
    xs_X: Sequence[float]
    ys_X: Sequence[float]
    colour: int = 0
    low_X: Sequence[float] = ()
    high_X: Sequence[float] = ()
    faint: bool = False  # raw values behind a smoothed line: no legend, no hover
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A title, a legend of (label, colour) and the drawing, once or in two widths."""

    title: str
    svgs: tuple[str, ...]
    legend: tuple[tuple[str, int], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class Canvas:
    """Collects the marks of one drawing inside its axes."""

    frame: Frame
    x_label: str
    marks: list[str] = field(default_factory=list)

    def add(self, mark: str) -> None:
        self.marks.append(mark)

    def svg(self, title: str, hover: str = "", x_ticks: bool = True) -> str:
        """``hover``: the attribute with the data of a chart that can be zoomed; its marks are
        then a drawing inside the drawing, whose ``viewBox`` the page's script moves."""
        frame, marks = self.frame, "".join(self.marks)
        if hover:
            x, y = LEFT - EDGE, TOP - EDGE
            size = (frame.width - RIGHT + EDGE - x, frame.height - BOTTOM + EDGE - y)
            box = 'x="{0}" y="{1}" width="{2}" height="{3}" viewBox="{0} {1} {2} {3}"'
            box = box.format(x, y, *size)
            marks = f'<svg class="plot" {box} preserveAspectRatio="none">{marks}</svg>'
        return (
            f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" '
            f'aria-label="{escape(title)}"{hover}>'
            f"{_axes(frame, self.x_label, x_ticks)}{marks}</svg>"
        )


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_range: tuple[float | None, float | None] = (None, None),
    percent: bool = False,
    wide: bool = False,
    x_label: str = "environment steps",
    note: str = "",
) -> Chart:
    """Lines, with bands where a series has them, over a common x-axis."""
    drawn = [_thinned(s) for s in series if len(s.xs_X)]
    frame = _frame(drawn, y_range, percent)
    svgs = []
    for width in (NARROW, WIDE) if wide else (NARROW,):
        canvas = Canvas(_sized(frame, width), x_label)
        for one in drawn:
            _draw_band(canvas, one)
        for one in drawn:
            _draw_line(canvas, one)
        svgs.append(canvas.svg(title, _hover(canvas.frame, drawn)))
    legend = tuple((s.label, s.colour) for s in drawn if not s.faint)
    return Chart(title, tuple(svgs), legend if len(legend) > 1 or wide else (), note)


def stacked_chart(
    title: str,
    parts: Sequence[Series],
    *,
    percent: bool = False,
    wide: bool = False,
    y_high: float | None = None,
    note: str = "",
) -> Chart:
    """Areas on top of each other, negative values below zero.

    All parts share their xs.
    """
    thin = [_thinned(p) for p in parts]
    xs = thin[0].xs_X
    tops, bottoms = [0.0] * len(xs), [0.0] * len(xs)
    layers = []
    for part in thin:
        for base, signed in zip((tops, bottoms), by_sign(part.ys_X), strict=True):
            edge = [b + y for b, y in zip(base, signed, strict=True)]
            layers += [(part, list(base), edge)] if any(signed) else []
            base[:] = edge
    outline = [Series("", xs, tops), Series("", xs, bottoms)]
    frame = _frame(outline, (min(0.0, *bottoms), y_high), percent)
    svgs = []
    for width in (NARROW, WIDE) if wide else (NARROW,):
        canvas = Canvas(_sized(frame, width), "environment steps")
        for part, base, edge in layers:
            area = canvas.frame.points([*xs, *reversed(xs)], [*edge, *reversed(base)])
            canvas.add(f'<polygon class="area f{part.colour % COLOURS + 1}" points="{area}"/>')
        svgs.append(canvas.svg(title, _hover(canvas.frame, thin, stacked=True)))
    return Chart(title, tuple(svgs), tuple((p.label, p.colour) for p in thin), note)


def by_sign(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The values above zero and those below it, 0 in the others' places."""
    return [max(v, 0.0) for v in values], [min(v, 0.0) for v in values]


def change_chart(
    title: str, rows: Sequence[tuple[str, float, float]], y_range: tuple[float, float], note: str
) -> Chart:
    """One column for each (label, before, after): a hollow dot, a full one and a line between."""
    svgs = []
    for width in (NARROW, WIDE):
        frame = Frame(-0.5, len(rows) - 0.5, *y_range, width=width)
        canvas = Canvas(frame, "tasks, by reward after training")
        radius = max(1.5, min(4.0, (width - LEFT - RIGHT) / len(rows) / 2.5))
        for i, (label, before, after) in enumerate(rows):
            x, y0, y1 = frame.x(i), frame.y(before), frame.y(after)
            way = "better" if after > before else "worse" if after < before else "same"
            canvas.add(
                f'<g class="{way}"><title>{escape(label)}: {before:.2f} → {after:.2f}</title>'
                f'<line class="change" x1="{x:.1f}" x2="{x:.1f}" y1="{y0:.1f}" y2="{y1:.1f}"/>'
                f'<circle class="before" cx="{x:.1f}" cy="{y0:.1f}" r="{radius:.1f}"/>'
                f'<circle class="after" cx="{x:.1f}" cy="{y1:.1f}" r="{radius:.1f}"/></g>'
            )
        svgs.append(canvas.svg(title, x_ticks=False))
    return Chart(title, tuple(svgs), (), note)


def histogram(title: str, values: Sequence[float], x_label: str, note: str = "") -> Chart:
    """Counts of values in up to 24 equal bins."""
    low, high = min(values), max(values)
    bins = max(1, min(24, len(values) // 4))
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    frame = Frame(low, low + width * bins, 0.0, float(max(counts)))
    canvas = Canvas(frame, x_label)
    for i, count in enumerate(counts):
        x0, x1 = frame.x(low + i * width), frame.x(low + (i + 1) * width)
        y = frame.y(count)
        canvas.add(
            f'<rect class="f1" x="{x0 + 0.5:.1f}" y="{y:.1f}" width="{max(x1 - x0 - 1, 1):.1f}" '
            f'height="{frame.y(0) - y:.1f}"><title>{count}</title></rect>'
        )
    return Chart(title, (canvas.svg(title),), (), note)


def scatter(
    title: str,
    groups: Sequence[tuple[str, int, Sequence[tuple[float, float, float]]]],
    x_label: str,
    note: str = "",
) -> Chart:
    """Dots of (label, colour, [(x, y, opacity 0 … 1)])."""
    points = [p for _, _, group in groups for p in group]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    frame = Frame(*_padded(min(xs), max(xs)), *_padded(min(ys), max(ys)))
    canvas = Canvas(frame, x_label)
    for _, colour, group in groups:
        for x, y, opacity in group:
            canvas.add(
                f'<circle class="f{colour % COLOURS + 1}" cx="{frame.x(x):.1f}" '
                f'cy="{frame.y(y):.1f}" r="3.5" opacity="{0.15 + 0.85 * opacity:.2f}"/>'
            )
    return Chart(title, (canvas.svg(title),), tuple((g[0], g[1]) for g in groups), note)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between low and high, about ``count`` of them."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float, percent: bool = False) -> str:
    """A tick's text: 20%, 1.5k, 2M, 0.25, 3e-05."""
    if percent:
        return f"{value * 100:.4g}%"
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.2g}" if 0 < size < 1e-3 else f"{value:.4g}"


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over ``window`` values around each; fewer at the ends."""
    half = window // 2
    return [_average(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _thinned(series: Series) -> Series:
    count = len(series.xs_X)
    if count <= MAX_POINTS:
        return series
    edges = [i * count // MAX_POINTS for i in range(MAX_POINTS + 1)]

    def bins(values: Sequence[float]) -> list[float]:
        if not len(values):
            return []
        return [_average(values[a:b]) for a, b in itertools.pairwise(edges)]

    return Series(
        series.label,
        bins(series.xs_X),
        bins(series.ys_X),
        series.colour,
        bins(series.low_X),
        bins(series.high_X),
        series.faint,
        series.dots,
    )


def _frame(
    series: Sequence[Series], y_range: tuple[float | None, float | None], percent: bool
) -> Frame:
    xs = [x for s in series for x in s.xs_X]
    ys = [y for s in series for y in (*s.ys_X, *s.low_X, *s.high_X)]
    low, high = _padded(min(ys), max(ys))
    low = low if y_range[0] is None else y_range[0]
    high = high if y_range[1] is None else y_range[1]
    if percent:
        low, high = 0.0, 1.0
    return Frame(min(xs), max(xs), low, high if high > low else low + 1.0, percent=percent)


def _sized(frame: Frame, width: int) -> Frame:
    height = HEIGHT if width == NARROW else 300
    return Frame(frame.x_low, frame.x_high, frame.y_low, frame.y_high, width, height, frame.percent)


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


def _draw_band(canvas: Canvas, series: Series) -> None:
    if not len(series.low_X):
        return
    frame = canvas.frame
    lows = [max(y, frame.y_low) for y in series.low_X]
    highs = [min(y, frame.y_high) for y in series.high_X]
    xs = list(series.xs_X)
    band = frame.points([*xs, *reversed(xs)], [*highs, *reversed(lows)])
    canvas.add(
        f'<polygon class="band f{series.colour % COLOURS + 1}" data-s="{series.colour}" '
        f'points="{band}"/>'
    )


def _draw_line(canvas: Canvas, series: Series) -> None:
    frame = canvas.frame
    kind = f"s{series.colour % COLOURS + 1}" + (" faint" if series.faint else "")
    dashes = f" d{series.colour // COLOURS % DASHES}" if series.colour >= COLOURS else ""
    ys = [min(max(y, frame.y_low), frame.y_high) for y in series.ys_X]
    if len(ys) > 1:
        points = frame.points(series.xs_X, ys)
        canvas.add(
            f'<polyline class="line {kind}{dashes}" data-s="{series.colour}" points="{points}"/>'
        )
    if series.dots or len(ys) == 1:
        for x, y in zip(series.xs_X, ys, strict=True):
            canvas.add(  # a line without length: round at any zoom
                f'<path class="dot {kind}" data-s="{series.colour}" '
                f'd="M{frame.x(x):.1f} {frame.y(y):.1f}h0"/>'
            )


def _hover(frame: Frame, series: Iterable[Series], stacked: bool = False) -> str:
    """What the page's script needs to show values under the pointer and to zoom."""
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
