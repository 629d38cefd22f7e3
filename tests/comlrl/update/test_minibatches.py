"""How a step's nodes are divided into updates."""

from __future__ import annotations

import pytest

from comlrl.update.minibatches import like_parts


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (5, 4, [3, 2]),  # two parts are needed: of 3 and 2, not of 4 and 1
        (5, 2, [2, 2, 1]),
        (10, 8, [5, 5]),
        (8, 3, [3, 3, 2]),
        (6, 3, [3, 3]),
        (5, None, [5]),
        (5, 9, [5]),
        (3, 1, [1, 1, 1]),
        (0, 4, []),
        (0, None, []),
    ],
)
def test_parts_of_like_size(total, size, expected):
    parts = like_parts(total, size)
    assert [len(part) for part in parts] == expected
    assert [i for part in parts for i in part] == list(range(total))
