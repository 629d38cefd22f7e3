"""The pictures of a matrix and of a sweep."""

from __future__ import annotations

import math

import pytest

from comlrl.loggers.report.heat_map import write_heat_map
from comlrl.loggers.report.parallel_coordinates import write_parallel_coordinates


def test_the_picture_is_written_where_values_are_missing(tmp_path):
    matrix = [[0.5, math.nan, 1.0], [math.nan, math.nan, 0.0]]
    for scale in (None, (0.0, 1.0)):
        write_heat_map(tmp_path / "x.png", ["a", "b"], ["c", "d", "e"], matrix, "T", scale=scale)
        assert (tmp_path / "x.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_heat_map(path, ["a"], ["b", "c"], [[0.5, 1.0]], "T"),
        lambda path: write_parallel_coordinates(path, ["x"], [{"x": 1}, {"x": 2}], [0.0, 1.0], "m"),
    ],
)
def test_a_picture_replaces_the_file_at_once(write, tmp_path):
    file = tmp_path / "x.png"
    file.write_bytes(b"old")
    with file.open("rb") as reader:
        write(file)
        assert reader.read() == b"old"
    assert file.stat().st_size > 5000
