"""Files that a run continues."""

from __future__ import annotations

import pytest

from comlrl.errors import UserError
from comlrl.files import keep


@pytest.mark.parametrize("line", ["garbage", "3", "{}"])
def test_a_damaged_file_is_refused_and_left_as_it_is(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    before = path.read_text()
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        keep(path, lambda _, line: line["step"] < 2)
    assert path.read_text() == before


def test_wanted_lines_are_left_and_a_torn_one_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    keep(path, lambda _, line: line["step"] < 2)
    assert path.read_text() == '{"step": 1}\n'
    keep(path, lambda _, line: False)
    assert not path.exists()
