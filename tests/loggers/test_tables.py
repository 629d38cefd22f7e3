"""Numbers in tables, and the report's own help."""

from __future__ import annotations

import pytest

from comlrl.loggers.tables import counted
from comlrl.loggers.views import view_of
from comlrl.loggers.views.view import listed
from comlrl.trainers.launch.__main__ import main


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (62.5, "62.5"), (999, "999"), (1234, "1.23 k"), (2.45e8, "245 M"),
        (9.9996e8, "1 G"), (1.5e9, "1.5 G"), (3.21e13, "32.1 T"), (4.5e15, "4500 T"),
    ],
)  # fmt: skip
def test_counts_have_three_digits_and_a_unit(value, text):
    assert counted(value) == text


def test_the_reports_help_names_its_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["comlrl"])
    with pytest.raises(SystemExit) as done:
        main(["report", "--help"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("usage: comlrl report ")


def test_the_last_of_many_agents_has_its_share():
    """Of solved programs that need it."""
    names = [f"agent_{i}/needed_rate" for i in range(9)]
    assert listed(view_of("code").tables, names) == names
