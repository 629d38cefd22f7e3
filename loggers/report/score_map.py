"""A scorecard as a table with shades for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from comlrl.evaluation.scorecard import Entry
from loggers.tables import table

NOTHING = "—"
SHADES = " ░▒▓█"  # of scores from 0 to 1
Entries = Mapping[tuple[str, str], Entry]  # (algorithm, task)


def score_table(entries: Entries, algorithms: Sequence[str], tasks: Sequence[str]) -> str:
    """Markdown: mean ± deviation of the seeds, and a line with the noise of one evaluation."""
    rows = [[name, *(_cell(entries.get((name, task))) for task in tasks)] for name in algorithms]
    noise = [
        [e.noise for name in algorithms if (e := entries.get((name, task))) and e.noise is not None]
        for task in tasks
    ]
    rows.append(["*noise of one evaluation*", *(f"{max(n):.2f}" if n else "" for n in noise)])
    return table(["algorithm", *tasks], rows)


def score_shades(entries: Entries, algorithms: Sequence[str], tasks: Sequence[str]) -> str:
    """A heat map of characters, a row for each algorithm."""
    left = max(map(len, (*algorithms, ""))) + 1
    width = max(map(len, tasks)) + 1
    lines = [" " * left + "".join(task.ljust(width) for task in tasks)]
    for name in algorithms:
        cells = [_shade(entries.get((name, task)), width - 1) for task in tasks]
        lines.append(name.ljust(left) + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def write_score_map(
    path: Path, entries: Entries, algorithms: Sequence[str], tasks: Sequence[str]
) -> None:
    """Write the picture; cells without a score are blank."""
    size = (2.6 + 0.95 * len(tasks), 1.6 + 0.45 * len(algorithms))
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    means = [[_mean(entries.get((name, task))) for task in tasks] for name in algorithms]
    image = axis.imshow(means, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, values in enumerate(means):
        for column, value in enumerate(values):
            known = value == value
            ink = "black" if not known or value > 0.5 else "white"
            text = f"{value:.2f}" if known else NOTHING
            axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right", fontsize=8)
    axis.set_yticks(range(len(algorithms)), algorithms, fontsize=8)
    axis.set_title("Score: 0 is the floor, 1 the optimum", fontsize=10)
    axis.spines[:].set_visible(False)
    figure.colorbar(image, shrink=0.8)
    figure.savefig(path, dpi=150)


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.mean is None:
        return NOTHING
    return f"{entry.mean:.2f}" + ("" if entry.deviation is None else f" ± {entry.deviation:.2f}")


def _shade(entry: Entry | None, width: int) -> str:
    if entry is None or entry.mean is None:
        return NOTHING.ljust(width)
    level = min(len(SHADES) - 1, max(0, int(entry.mean * len(SHADES))))
    return f"{entry.mean:5.2f} ".ljust(width, SHADES[level])[:width]


def _mean(entry: Entry | None) -> float:
    return float("nan") if entry is None or entry.mean is None else entry.mean
