"""Several runs as one picture: seeds of the same setting averaged, settings side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loggers.curves import COLOURS, plain
from loggers.jsonl import replace
from loggers.report_charts import Section, reward_ceiling
from loggers.report_page import page
from loggers.run_data import Run
from loggers.svg import Chart, Series, line_chart

SHOWN = (  # metric, title, shown as percent
    ("reward_mean", "Mean reward", False),
    ("pass_rate", "All tests pass", True),
    ("aux_called_rate", "Main calls aux", True),
    ("wrapper_rate", "Thin wrappers", True),
)
NOT_SETTINGS = (
    "seed",
    "output",
    "wandb",
    "agent_devices",
    "distributed",
)  # what seeds may differ in
RESAMPLES = 2000
GRID = 100  # points of an averaged curve


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but the seed, under a name that tells them from the others."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric's mean over seeds with its 95% bootstrap interval, on environment steps."""

    xs_X: np.ndarray
    mean_X: np.ndarray
    low_X: np.ndarray
    high_X: np.ndarray


def write_comparison(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Write ``comparison.html``, ``.png`` and ``.svg`` into a folder; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    groups = grouped(runs)
    html = folder / "comparison.html"
    replace(html, render(groups))
    pictures = [folder / "comparison.png", folder / "comparison.svg"]
    _pictures(groups, pictures)
    return [html, *pictures]


def render(groups: Sequence[Group]) -> str:
    """The page that compares groups of runs."""
    charts = []
    for name, title, percent in SHOWN:
        for phase, where in (("eval", "held-out tasks"), ("train", "training")):
            chart = _chart(groups, phase, name, f"{title}, {where}", percent)
            charts += [chart] if chart else []
    count = sum(len(group.runs) for group in groups)
    note = (
        "Mean over seeds; band: 95% bootstrap interval of that mean, where there is more than one."
    )
    return page(
        title="Comparison",
        subtitle=f"{count} runs, {len(groups)} settings",
        sections=[Section("Curves", tuple(charts), note)],
        table=_table(groups),
    )


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs of one algorithm and configuration, seed aside, together; in the order given.

    A group is named after its algorithm and the settings that tell it from others of it.
    """
    members: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = json.dumps(_settings(run), sort_keys=True)
        members.setdefault((run.algorithm, key), []).append(run)
    return [
        Group(_name(algorithm, key, list(members)), tuple(together))
        for (algorithm, key), together in members.items()
    ]


def _name(algorithm: str, key: str, groups: Sequence[tuple[str, str]]) -> str:
    rivals = [json.loads(other) for name, other in groups if name == algorithm]
    own = json.loads(key)
    differing = [
        name
        for name in sorted({name for one in rivals for name in one})
        if any(one.get(name) != own.get(name) for one in rivals)
    ]
    told = [f"{name.removeprefix(algorithm + '.')}={own.get(name)}" for name in differing]
    return " ".join([algorithm.upper(), *told])


def bootstrap(values_S: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of S values; one value: no width."""
    values = np.asarray(values_S, dtype=float)
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def curve(runs: Sequence[Run], phase: str, name: str) -> Curve | None:
    """A metric averaged over runs where all of them have it; None where one never has.

    Runs are read off at common environment steps by straight lines between their records.
    """
    lines = [run.series(phase, name) for run in runs]
    if not all(xs for xs, _ in lines):
        return None
    start, end = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
    if start > end:
        return None
    own = sorted({x for xs, _ in lines for x in xs if start <= x <= end})
    grid = np.asarray(own if len(own) <= GRID else np.linspace(start, end, GRID))
    values_SX = np.array([np.interp(grid, xs, ys) for xs, ys in lines])
    bands = [bootstrap(column) for column in values_SX.T]
    low, high = np.array(bands).T
    return Curve(grid, values_SX.mean(axis=0), low, high)


def _settings(run: Run) -> dict[str, Any]:
    """The configuration as dotted keys, without what may differ between seeds."""
    kept = {key: value for key, value in run.config.items() if key not in NOT_SETTINGS}
    return dict(_flat(kept))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _chart(
    groups: Sequence[Group], phase: str, name: str, title: str, percent: bool
) -> Chart | None:
    series = []
    for colour, group in enumerate(groups):
        one = curve(group.runs, phase, name)
        if one is not None:
            several = len(group.runs) > 1
            series.append(
                Series(
                    group.name,
                    one.xs_X.tolist(),
                    one.mean_X.tolist(),
                    colour,
                    one.low_X.tolist() if several else [],
                    one.high_X.tolist() if several else [],
                    dots=phase == "eval",
                )
            )
    if not series:
        return None
    ceiling = _ceiling(groups) if name == "reward_mean" else None
    y_range = (0.0 if ceiling else None, ceiling)
    return line_chart(title, series, percent=percent, y_range=y_range, wide=name == "reward_mean")


def _ceiling(groups: Sequence[Group]) -> float | None:
    ceilings = [reward_ceiling(run) for group in groups for run in group.runs]
    known = [c for c in ceilings if c is not None]
    return max(known) if len(known) == len(ceilings) else None


def _table(groups: Sequence[Group]) -> list[list[str]]:
    """Last evaluation of each group: mean and interval over its seeds."""
    rows = [["setting", "seeds", "reward before", "reward after", "all tests pass", "steps"]]
    for group in groups:
        rewards = [run.series("eval", "reward_mean")[1] for run in group.runs]
        passes = [run.series("eval", "pass_rate")[1] for run in group.runs]
        steps = [max(r["step"] for r in run.records) for run in group.runs if run.records]
        rows.append(
            [
                group.name,
                str(len(group.runs)),
                _interval([ys[0] for ys in rewards if ys]),
                _interval([ys[-1] for ys in rewards if ys]),
                _interval([ys[-1] for ys in passes if ys]),
                f"{np.mean(steps):,.0f}" if steps else "–",
            ]
        )
    return rows


def _interval(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, high = bootstrap(values)
    return f"{np.mean(values):.2f} [{low:.2f}, {high:.2f}]"


def _pictures(groups: Sequence[Group], paths: Sequence[Path]) -> None:
    """Reward and pass rate of the groups for a paper: of evaluation where there is any."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    evaluated = all(run.series("eval", "reward_mean")[0] for g in groups for run in g.runs)
    phase = "eval" if evaluated else "train"
    for axis, (name, title, _) in zip(axes, SHOWN, strict=False):
        for i, group in enumerate(groups):
            _plot(axis, group, phase, name, COLOURS[i % len(COLOURS)])
        axis.set_title(title + (" on held-out tasks" if evaluated else ""), fontsize=10)
        axis.set_xlabel("environment steps")
        plain(axis)
    for path in paths:
        figure.savefig(path, dpi=200)


def _plot(axis: Axes, group: Group, phase: str, name: str, colour: str) -> None:
    one = curve(group.runs, phase, name)
    if one is None:
        return
    axis.plot(one.xs_X, one.mean_X, color=colour, label=group.name)
    if len(group.runs) > 1:
        axis.fill_between(one.xs_X, one.low_X, one.high_X, color=colour, alpha=0.15)
