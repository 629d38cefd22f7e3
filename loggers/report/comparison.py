"""Comparison of several runs: seeds of one setting are averaged, settings shown side by side."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.files import replace
from comlrl.loggers.report.chart import Chart, Series
from comlrl.loggers.report.charts import Section
from comlrl.loggers.report.lines import is_share, reward_ceiling, reward_range
from comlrl.loggers.report.page import page
from comlrl.loggers.report.pictures import write_charts
from comlrl.loggers.report.run_data import ReportError, Run
from comlrl.loggers.views.view import Metric, View, titled
from comlrl.run_files import REPORT

REWARD = Metric("Mean reward", "reward_mean")
NOT_SETTINGS = ("seed", "output", "wandb", "trackio", "agent_devices", "distributed")
GRID = 100  # points of an averaged curve


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ only in the seed, and a name for their setting."""

    name: str
    runs: tuple[Run, ...]
    run_names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Return the name and runs, e.g. ``MAGRPO num_turns=2 (runs/a, runs/b, 3 more)``."""
        more = len(self.run_names) - 2
        shown = (*self.run_names[:2], *([f"{more} more"] if more > 0 else []))
        return f"{self.name} ({', '.join(shown)})"


def write_comparison(
    runs: Sequence[Run], folder: str | Path, labels: Sequence[str] | None = None
) -> list[Path]:
    """Write ``comparison.html``, ``.png`` and ``.svg`` into a folder; return their paths.

    ``labels``: names of the settings, in order. Raises ReportError if their number differs from
    that of the settings.
    """
    groups = grouped(runs, labels)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    html = folder / "comparison.html"
    replace(html, render(groups, folder))
    pictures = [folder / "comparison.png", folder / "comparison.svg"]
    _pictures(groups, pictures)
    return [html, *pictures]


def render(groups: Sequence[Group], folder: Path = Path()) -> str:
    """Return a page that compares groups of runs, with links relative to ``folder``."""
    count = sum(len(group.runs) for group in groups)
    note = (
        "Mean over seeds; where there is more than one, band: 95% bootstrap interval of that mean, "
        "faint: each seed on held-out tasks."
    )
    keys = ("domain", "reward")
    if (
        len({json.dumps([g.runs[0].config.get(k) for k in keys], sort_keys=True) for g in groups})
        > 1
    ):
        note += " The settings do not share one reward: how high their curves lie does not compare."
    return page(
        title="Comparison",
        subtitle=f"{count} runs, {len(groups)} setting{'s' if len(groups) > 1 else ''}",
        key=[(group.name, _links(group, folder)) for group in groups],
        sections=[Section("Curves", tuple(charts_of(groups).values()), note)],
        numbers=_table(groups),
    )


def _links(group: Group, folder: Path) -> list[tuple[str, str]]:
    """Return (name, path of the report relative to ``folder``, or "") of each run."""
    reports = [run.path / REPORT for run in group.runs]
    ways = [os.path.relpath(file, folder.resolve()) if file.is_file() else "" for file in reports]
    return list(zip(group.run_names, map(quote, ways), strict=True))


def _shown(groups: Sequence[Group]) -> list[Metric]:
    """Return reward and pass rate, then the metrics that the domains' views select."""
    runs = [run for group in groups for run in group.runs]
    shares = [metric for run in runs for metric in titled(run.view.compared, run.all_names)]
    return list(dict.fromkeys([REWARD, _passed(groups), *shares]))


def _passed(groups: Sequence[Group]) -> Metric:
    """Return the pass rate under the domain's name for it."""
    words = {run.view.passed for group in groups for run in group.runs}
    word = words.pop() if len(words) == 1 else View().passed
    return Metric(word[:1].upper() + word[1:], "pass_rate")


def grouped(runs: Sequence[Run], labels: Sequence[str] | None = None) -> list[Group]:
    """Group the seeds of each setting, in the order of the runs; ``labels`` name the settings.

    Runs belong to one setting if algorithm, configuration and held-out data are the same and their
    seeds differ. A run without ``config.yaml`` forms its own group, as its setting is unknown. A
    group is named after its algorithm and the settings that distinguish it from others of that
    algorithm.
    Raises ReportError if there are not as many labels as settings.
    """
    members: list[tuple[str, list[Run]]] = []
    for run in runs:
        key, seed = _setting(run), run.config.get("seed")
        for setting, seeds in members:
            taken = [other.config.get("seed") for other in seeds]
            if run.config and setting == key and seed not in taken:
                seeds.append(run)
                break
        else:
            members.append((key, [run]))
    together = [seeds for _, seeds in members]
    names = labels or [_name(seeds[0], [other[0] for other in together]) for seeds in together]
    if len(names) != len(together):
        listed = "; ".join(", ".join(run.path.name for run in seeds) for seeds in together)
        raise ReportError(
            f"--labels: {len(names)} for {len(together)} settings; name each of: {listed}"
        )
    count = Counter(run.path.name for run in runs)  # repeated names: add the parent folder

    def run_name(path: Path) -> str:
        return path.name if count[path.name] == 1 else f"{path.parent.name}/{path.name}"

    return [
        Group(name, tuple(seeds), tuple(run_name(run.path) for run in seeds))
        for name, seeds in zip(names, together, strict=True)
    ]


def _setting(run: Run) -> str:
    """Return a text that identifies a run's setting.

    It contains the algorithm, the configuration (with domain, reward, prompts and mode), the user's
    own modules, and the held-out data.
    """
    held_out = sorted({(s["task_id"], s["problem"]) for s in run.samples if s["phase"] == "eval"})
    return json.dumps([run.algorithm, _settings(run), held_out], sort_keys=True)


def _name(run: Run, others: Sequence[Run]) -> str:
    """Return the algorithm and the settings that other runs of it lack: ``MAGRPO num_turns=2``."""
    rivals = [_settings(other) for other in others if other.algorithm == run.algorithm]
    settings = _settings(run)
    keys = sorted(set().union(*rivals))
    differing = [k for k in keys if any(rival.get(k) != settings.get(k) for rival in rivals)]
    words = [f"{key.removeprefix(run.algorithm + '.')}={settings.get(key)}" for key in differing]
    return " ".join([run.algorithm.upper(), *words])


def curve(
    runs: Sequence[Run], phase: str, name: str, label: str = "", colour: int = 0
) -> Series | None:
    """Return a metric averaged over runs, or None if a run lacks it.

    The band is the mean's 95% bootstrap interval. Runs are interpolated linearly at common
    environment steps. The training reward is the task reward, even if training followed a reward
    model's score.
    """
    task = "task_reward_mean" if (phase, name) == ("train", "reward_mean") else name
    lines = [run.series(phase, task if run.series(phase, task)[0] else name) for run in runs]
    if not all(xs for xs, _ in lines):
        return None
    start, end = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
    if start > end:
        return None
    steps = sorted({x for xs, _ in lines for x in xs if start <= x <= end})
    grid = steps if len(steps) <= GRID else np.linspace(start, end, GRID).tolist()
    values_SX = np.array([np.interp(grid, xs, ys) for xs, ys in lines])
    bands = [bootstrap_interval(column) for column in values_SX.T] if len(runs) > 1 else []
    low, high = zip(*bands, strict=True) if bands else ((), ())
    means = values_SX.mean(axis=0).tolist()
    return Series(label, grid, means, colour, low, high, dots=phase == "eval")


def _settings(run: Run) -> dict[str, Any]:
    """Return the configuration as dotted keys, without keys that may differ between seeds.

    Digests of the user's own modules are included.
    """
    shared = {key: value for key, value in run.config.items() if key not in NOT_SETTINGS}
    return _flat(shared) | {name: digest[:8] for name, digest in run.modules.items()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        pairs |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return pairs


def charts_of(groups: Sequence[Group]) -> dict[str, Chart]:
    """Return the comparison charts, keyed by ``phase_metric``."""
    return {
        f"{phase}_{metric.name.replace('/', '_')}": chart
        for metric in _shown(groups)
        for phase, where in (("eval", "held-out tasks"), ("train", "training"))
        if (chart := _chart(groups, phase, metric, where))
    }


def _chart(groups: Sequence[Group], phase: str, metric: Metric, where: str) -> Chart | None:
    name, series = metric.name, []
    for colour, group in enumerate(groups):
        mean = curve(group.runs, phase, name, group.name, colour)
        if mean is not None:
            if len(group.runs) > 1 and phase == "eval":
                lines = [run.series(phase, name) for run in group.runs]
                series += [Series("", *line, colour, faint=True) for line in lines]
            series.append(mean)
    if not series:
        return None
    ceiling = _ceiling(groups) if name == "reward_mean" else None
    percent = is_share(name, [y for line in series for y in line.ys_X])
    return Chart(
        f"{metric.title}, {where}",
        series,
        percent=percent,
        y_range=reward_range(series, ceiling),
        wide=metric == REWARD,
        shared_legend=True,
    )


def _ceiling(groups: Sequence[Group]) -> float | None:
    ceilings = [reward_ceiling(run) for group in groups for run in group.runs]
    return None if None in ceilings else max(c for c in ceilings if c is not None)


def _table(groups: Sequence[Group]) -> list[list[str]]:
    """Return a table of each group's last evaluation: mean and interval over its seeds."""
    passed = _passed(groups).title.lower()
    rows = [["setting", "seeds", "reward before", "reward after", passed, "steps"]]
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
    if all(row[4] == "–" for row in rows[1:]):  # no run has a pass criterion
        rows = [[*row[:4], *row[5:]] for row in rows]
    return rows


def _interval(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, high = bootstrap_interval(values)
    return f"{np.mean(values):.2f} [{low:.2f}, {high:.2f}]"


def _pictures(groups: Sequence[Group], paths: Sequence[Path]) -> None:
    """Draw the groups' reward and pass rate for a paper, from evaluations if there are any."""
    charts = charts_of(groups)
    phase = "eval" if "eval_reward_mean" in charts else "train"
    where = {"eval": "on held-out tasks", "train": "in training"}[phase]
    both = [charts.get(f"{phase}_{name}") for name in ("reward_mean", "pass_rate")]
    labels = [
        group.label + ("" if curve(group.runs, phase, "reward_mean") else f", none {where}")
        for group in groups
    ]
    write_charts([chart for chart in both if chart], *paths, labels=labels)
