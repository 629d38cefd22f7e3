"""A scorecard as a Markdown table, and as shades for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comlrl.evaluation.scorecard import Entry
from comlrl.loggers.tables import table

NOTHING = "—"
SHADES = " ░▒▓█"  # of scores from 0 to 1
Entries = Mapping[tuple[str, str], Entry]  # (algorithm, task)


def score_table(entries: Entries, algorithms: Sequence[str], tasks: Sequence[str]) -> str:
    """Return Markdown: mean ± deviation of the seeds, and a line with one evaluation's noise."""
    rows = [[name, *(_cell(entries.get((name, task))) for task in tasks)] for name in algorithms]
    noise = [
        [e.noise for name in algorithms if (e := entries.get((name, task))) and e.noise is not None]
        for task in tasks
    ]
    rows.append(["*noise of one evaluation*", *(f"{max(n):.2f}" if n else "" for n in noise)])
    return table(["algorithm", *tasks], rows)


def score_shades(entries: Entries, algorithms: Sequence[str], tasks: Sequence[str]) -> str:
    """Return a heat map of characters, a row for each algorithm."""
    left = max(map(len, (*algorithms, ""))) + 1
    width = max(map(len, tasks)) + 1
    lines = [" " * left + "".join(task.ljust(width) for task in tasks)]
    for name in algorithms:
        cells = [_shade(entries.get((name, task)), width - 1) for task in tasks]
        lines.append(name.ljust(left) + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.mean is None:
        return NOTHING
    return f"{entry.mean:.2f}" + ("" if entry.deviation is None else f" ± {entry.deviation:.2f}")


def _shade(entry: Entry | None, width: int) -> str:
    if entry is None or entry.mean is None:
        return NOTHING.ljust(width)
    level = min(len(SHADES) - 1, max(0, int(entry.mean * len(SHADES))))
    return f"{entry.mean:5.2f} ".ljust(width, SHADES[level])[:width]
