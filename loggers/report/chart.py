"""Charts as data, for ``pictures.py`` to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import numpy as np

BLUE, ORANGE, GREEN, PURPLE, YELLOW, PINK, OLIVE, GREY = range(8)  # further lines are dashed
MAX_POINTS = 300  # per line; more are averaged in bins
Kind = Literal["lines", "stacked", "change", "bars", "dots"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line with an optional band ``low_X`` to ``high_X``. The x-values of bars are their
    edges."""

    label: str
    xs_X: Sequence[float]
    ys_X: Sequence[float]
    colour: int = 0
    low_X: Sequence[float] = ()
    high_X: Sequence[float] = ()
    faint: bool = False  # raw values behind a smoothed line, not in legends
    dots: bool = False
    opacity_X: Sequence[float] = ()  # of dots, in [0, 1]


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on common axes.

    ``stacked``: stacked areas, negative values below zero; the series share their x-values.
    ``change``: two series, before and after.
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
    shared_legend: bool = False  # one legend for all charts of the page

    @property
    def legend(self) -> tuple[tuple[str, int], ...]:
        """Return (label, colour) of each series; empty if the only label would repeat the title."""
        shown = tuple((s.label, s.colour) for s in self.series if not s.faint)
        alone = self.kind == "lines" and len(shown) == 1 and not self.wide
        return () if alone or self.shared_legend or self.kind in ("change", "bars") else shown


def thinned(series: Series) -> Series:
    """Return a line of at most ``MAX_POINTS`` points, by averaging in bins."""
    if len(series.xs_X) <= MAX_POINTS:
        return series
    lines = (series.xs_X, series.ys_X, series.low_X, series.high_X)
    xs, ys, low, high = (
        [float(part.mean()) for part in np.array_split(line, MAX_POINTS)] if len(line) else []
        for line in lines
    )
    return replace(series, xs_X=xs, ys_X=ys, low_X=low, high_X=high)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the moving average over ``window`` values, fewer at the ends."""
    half, count = window // 2, len(values)
    if not count:
        return []
    # Unlike differences of prefix sums, these sums keep their precision next to a very large value.
    sums, sizes = (
        np.convolve(line, np.ones(2 * half + 1))[half : half + count]
        for line in (values, np.ones(count))
    )
    return (sums / sizes).tolist()
