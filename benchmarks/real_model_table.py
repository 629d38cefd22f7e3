"""Results of SmolLM2's configurations: a table of their evaluations, and their curves.

    python benchmarks/real_model_table.py NAME=RUN[:CPU_MINUTES] … [--figure FILE]

One row for the first evaluation of each run and one for its last; a column that would be empty is
left out. The figure has the training reward, a mean over five updates, by sampled tokens, and by
minutes where CPU_MINUTES gives a whole run's. Runs of MADPO and MARLHF have a point a round: the
task reward of its labelled candidates.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comlrl.files import read_lines
from comlrl.loggers.report.chart import Chart, Series, smoothed
from comlrl.loggers.report.pictures import write_charts
from comlrl.loggers.tables import table
from comlrl.run_files import METRICS, PREFERENCES

COLUMNS: Mapping[str, tuple[str, float]] = {  # heading → metric, and what it is multiplied by
    "reward": ("reward_mean", 1),
    "compiles": ("syntax_rate", 100),
    "tests": ("test_fraction", 100),
    "calls aux": ("aux_called_rate", 100),
    "wrapper": ("wrapper_rate", 100),
    "ignored": ("aux_ignored_rate", 100),
    "cut": ("truncation_share", 100),
    "tokens": ("completion_length_mean", 1),
    "pass@1": ("pass@1", 100),
    "pass@4": ("pass@4", 100),
    "aux needed": ("agent_0/needed_rate", 100),
    "main needed": ("agent_1/needed_rate", 100),
    "teamwork": ("teamwork_rate", 100),
}
WINDOW = 5  # updates


def row(name: str, metrics: Mapping[str, Any]) -> list[str]:
    """Return a table row; absent metrics are empty."""
    cells = [name]
    for metric, times in COLUMNS.values():
        value = metrics.get(metric)
        cells.append(
            "" if value is None else f"{times * value:.0f} %" if times > 1 else f"{value:.2f}"
        )
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A training step, whose reward is a mean over its neighbors too, or a round of preferences."""

    reward: float
    tokens: int  # sampled for it
    seconds: float


def points(folder: Path, train: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the points of ``train``, the metrics of the run's training steps and stages."""
    if not (folder / PREFERENCES).exists():
        steps = [m for m in train if "step_seconds" in m]
        rewards = smoothed([m["reward_mean"] for m in steps], WINDOW)
        return [
            Point(reward=reward, tokens=m["tokens"], seconds=m["step_seconds"])
            for reward, m in zip(rewards, steps, strict=True)
        ]
    labels = itertools.groupby(read_lines(folder / PREFERENCES), key=lambda line: line["round"])
    rounds = [[c for line in lines for c in line["candidates"]] for _, lines in labels]
    steps_of = steps_by_labels(train)
    round_points, labelled = [], 0
    for candidates in rounds:
        labelled += len(candidates)
        steps = steps_of.get(labelled, [])  # none if the run was stopped after labelling
        tokens = sum(len(ids) for candidate in candidates for ids in candidate["token_ids"])
        round_points.append(
            Point(
                reward=statistics.fmean(candidate["reward"] for candidate in candidates),
                tokens=tokens + sum(m.get("tokens", 0) for m in steps),
                seconds=sum(m["step_seconds"] for m in steps),
            )
        )
    return round_points


def steps_by_labels(train: Sequence[Mapping[str, Any]]) -> dict[float, list[Mapping[str, Any]]]:
    """Return the training steps by the number of candidates labelled before them.

    MADPO logs this number with each step, MARLHF once a round.
    """
    steps: dict[float, list[Mapping[str, Any]]] = {}
    labelled = 0.0
    for metrics in train:
        labelled = metrics.get("preferences/labelled", labelled)
        if "step_seconds" in metrics:
            steps.setdefault(labelled, []).append(metrics)
    return steps


def curve(name: str, number: int, points: Sequence[Point], minutes: float | None) -> Series:
    """Return the training reward by sampled tokens, in thousands, or by minutes of the run."""
    if minutes is None:
        costs = [point.tokens / 1000 for point in points]
    else:
        total_seconds = sum(point.seconds for point in points)
        costs = [minutes * point.seconds / total_seconds for point in points]
    return Series(name, list(itertools.accumulate(costs)), [p.reward for p in points], number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN[:CPU_MINUTES]")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    rows, by_tokens, by_minutes = [], [], []
    for number, argument in enumerate(options.runs):
        name, _, place = argument.partition("=")
        folder, _, minutes = place.partition(":")
        lines = list(read_lines(Path(folder) / METRICS))
        evaluations = [line["metrics"] for line in lines if line["phase"] == "eval"]
        rows += [row(f"{name}, start", evaluations[0]), row(f"{name}, end", evaluations[-1])]
        train = [line["metrics"] for line in lines if line["phase"] == "train"]
        trained = points(Path(folder), train)
        by_tokens.append(curve(name, number, trained, None))
        if minutes:
            by_minutes.append(curve(name, number, trained, float(minutes)))
    columns = zip(["run", *COLUMNS], *rows, strict=True)
    filled = [column for column in columns if any(column[1:])]
    headings, *rows = map(list, zip(*filled, strict=True))
    print(table(headings, rows))
    if options.figure:
        charts = [Chart("Training reward", by_tokens, x_label="sampled tokens, thousands")]
        if by_minutes:
            charts.append(Chart("Training reward", by_minutes, x_label="CPU minutes of one core"))
        write_charts(charts, options.figure)


if __name__ == "__main__":
    main()
