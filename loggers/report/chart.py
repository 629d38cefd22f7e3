"""A chart as data. ``svg.py`` draws it for the page, ``pictures.py`` as PNG and PDF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

COLOURS, DASHES = 8, 4  # further lines repeat the colours, dashed in so many ways
BLUE, ORANGE, GREEN, PURPLE, YELLOW, PINK, OLIVE, GREY = range(COLOURS)
Kind = Literal["lines", "stacked", "change", "bars", "dots"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line; ``low_X``/``high_X`` are a band around it. The x-values of bars are their edges."""

    label: str
    xs_X: Sequence[float]
    ys_X: Sequence[float]
    colour: int = 0
    low_X: Sequence[float] = ()
    high_X: Sequence[float] = ()
    faint: bool = False  # raw values behind a smoothed line: no legend, no hover
    dots: bool = False
    opacity_X: Sequence[float] = ()  # of a chart of dots, 0 … 1


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on common axes.

    ``stacked``: areas on top of each other, negative values below zero; the series share their
    x-values. ``change``: two series, before and after, in one column for each of ``names``.
    """

    title: str
    series: Sequence[Series]
    kind: Kind = "lines"
    _: KW_ONLY
    y_range: tuple[float | None, float | None] = (None, None)
    percent: bool = False
    wide: bool = False
    x_label: str = "environment steps"
    note: str = ""
    names: Sequence[str] = ()
    own_legend: bool = True

    @property
    def legend(self) -> tuple[tuple[str, int], ...]:
        """(label, colour) of each series; empty where one label would repeat the title."""
        shown = tuple((s.label, s.colour) for s in self.series if not s.faint)
        alone = self.kind == "lines" and len(shown) == 1 and not self.wide
        unnamed = self.kind in ("change", "bars")
        return () if alone or unnamed or not self.own_legend else shown


def stacked(parts: Sequence[Series]) -> list[tuple[Series, list[float], list[float]]]:
    """Return (part, its area's lower edge, its upper edge) for each part and sign that it has."""
    areas = []
    tops, bottoms = ([0.0] * len(parts[0].xs_X) for _ in range(2))
    for part in parts:
        above = [max(y, 0.0) for y in part.ys_X]
        below = [min(y, 0.0) for y in part.ys_X]
        for base, signed in ((tops, above), (bottoms, below)):
            edge = [b + y for b, y in zip(base, signed, strict=True)]
            areas += [(part, list(base), edge)] if any(signed) else []
            base[:] = edge
    return areas


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over ``window`` values around each; fewer at the ends."""
    half = window // 2
    return [average(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
