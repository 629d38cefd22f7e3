"""The picture of a matrix."""

from __future__ import annotations

import math

from comlrl.loggers.report.heat_map import write_heat_map


def test_the_picture_is_written_where_values_are_missing(tmp_path):
    matrix = [[0.5, math.nan, 1.0], [math.nan, math.nan, 0.0]]
    for scale in (None, (0.0, 1.0)):
        write_heat_map(tmp_path / "x.png", ["a", "b"], ["c", "d", "e"], matrix, "T", scale=scale)
        assert (tmp_path / "x.png").stat().st_size > 5000
