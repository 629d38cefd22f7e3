"""The scorecard's table."""

from __future__ import annotations

from comlrl.evaluation.scorecard import Entry
from comlrl.loggers.score_tables import score_table

ENTRIES = {
    ("first", "codes"): Entry(mean=0.5, deviation=0.25, noise=0.03, seeds=3),
    ("first", "levers"): Entry(
        mean=None, deviation=None, noise=None, seeds=0, reasons=("shares a policy",)
    ),
    ("second", "codes"): Entry(mean=1.0, deviation=None, noise=0.01, seeds=1),
}
NAMES, TASKS = ["first", "second"], ["codes", "levers"]


def test_the_table_has_mean_deviation_and_noise():
    assert score_table(ENTRIES, NAMES, TASKS).splitlines() == [
        "| algorithm                 |       codes | levers |",
        "|:--------------------------|------------:|-------:|",
        "| first                     | 0.50 ± 0.25 |      — |",
        "| second                    |        1.00 |      — |",
        "| *noise of one evaluation* |        0.03 |        |",
    ]
