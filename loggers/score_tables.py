"""A scorecard as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comlrl.evaluation.scorecard import Entry
from comlrl.loggers.tables import table

NOTHING = "—"
Entries = Mapping[tuple[str, str], Entry]  # (algorithm, task)


def score_table(entries: Entries, algorithms: Sequence[str], tasks: Sequence[str]) -> str:
    """Return Markdown: mean ± standard deviation over seeds, and a row of evaluation noise."""
    rows = [[name, *(_cell(entries.get((name, task))) for task in tasks)] for name in algorithms]
    noise = [
        [e.noise for name in algorithms if (e := entries.get((name, task))) and e.noise is not None]
        for task in tasks
    ]
    rows.append(["*noise of one evaluation*", *(f"{max(n):.2f}" if n else "" for n in noise)])
    return table(["algorithm", *tasks], rows)


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.mean is None:
        return NOTHING
    return f"{entry.mean:.2f}" + ("" if entry.deviation is None else f" ± {entry.deviation:.2f}")
