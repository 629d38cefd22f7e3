"""Lines for the charts of a run: metrics over environment steps, optionally smoothed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from comlrl.loggers.report.chart import BLUE, ORANGE, Chart, Series, smoothed
from comlrl.loggers.report.run_data import Run
from comlrl.loggers.views.view import Metric

AGENT = re.compile(r"^agent_(\d+)/(.+)$")


def learning_series(run: Run) -> list[Series]:
    """Return the mean reward of training (raw, smoothed, with its spread) and of evaluation.

    If training followed a model's score, return the task reward; if it used only preferences, the
    reward of the labelled candidates. No spread is logged for these two.
    """
    series = []
    names = ("task_reward_mean", "reward_mean", "preferences/reward_mean")
    name = next((name for name in names if run.series("train", name)[0]), "")
    xs, ys = run.series("train", name)
    if xs:
        window = max(1, len(ys) // 20)
        mean = smoothed(ys, window)
        spread = run.series("train", "reward_std")[1] if name == "reward_mean" else []
        spread = smoothed(spread, window) if len(spread) == len(mean) else [0.0] * len(mean)
        if len(ys) > 1:
            series.append(Series("", xs, ys, BLUE, faint=True))
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        series.append(Series("training", xs, mean, BLUE, low, high))
    xs, ys = run.series("eval", "reward_mean")
    if xs:
        margins = _margins(run, len(ys))
        low = [y - m for y, m in zip(ys, margins, strict=False)]
        high = [y + m for y, m in zip(ys, margins, strict=False)]
        series.append(Series("held-out tasks", xs, ys, ORANGE, low, high, dots=True))
    return series


def _margins(run: Run, count: int) -> list[float]:
    """Return half the width of the 95% interval of each evaluation's mean, 1.96 σ/√tasks; empty if
    unknown.

    It is overestimated if tasks are answered several times (``eval_answers``).
    """
    _, spread = run.series("eval", "reward_std")
    _, tasks = run.series("eval", "tasks")
    if not len(spread) == len(tasks) == count:
        return []
    return [1.96 * s / math.sqrt(n) for s, n in zip(spread, tasks, strict=True)]


def reward_ceiling(run: Run) -> float | None:
    """Return the greatest possible reward, or None if unknown."""
    return run.domain.get("greatest_reward")


def reward_range(
    series: Sequence[Series], ceiling: float | None
) -> tuple[float | None, float | None]:
    """Return the range of the reward axis; None: no limit.

    It starts at 0, or below the lowest value if that is negative, and ends at the greatest possible
    reward, if known.
    """
    if ceiling is None:
        return None, None
    lowest = min((y for line in series for y in line.ys_X), default=0.0)
    return (None if lowest < 0 else 0.0), ceiling


def is_share(name: str, values: Iterable[float]) -> bool:
    """Return whether a metric is a share, to be shown in percent."""
    return name.endswith(("_rate", "_share", "_fraction")) and all(0 <= v <= 1 for v in values)


def metric_chart(
    run: Run,
    phase: str,
    title: str,
    names: Sequence[tuple[str, str]],
    percent: bool = True,
    low: float | None = None,
) -> list[Chart]:
    """Return one chart of the (label, metric) pairs; [] if no metric has two points."""
    series = [
        Series(text or title, *smooth(run, phase, name), i) for i, (text, name) in enumerate(names)
    ]
    series = [s for s in series if len(s.xs_X) > 1]
    return [Chart(title, series, percent=percent, y_range=(low, None))] if series else []


def both_phases(
    run: Run, metric: Metric, percent: bool | None = None, held_out: str = "held-out tasks"
) -> list[Chart]:
    """Return one chart of a metric in training and evaluation; [] if neither has two points."""
    series = [
        Series(text, *smooth(run, phase, metric.name), i, dots=phase == "eval")
        for i, (text, phase) in enumerate((("training", "train"), (held_out, "eval")))
    ]
    series = [s for s in series if len(s.xs_X) > 1]
    if percent is None:
        percent = is_share(metric.name, [y for s in series for y in s.ys_X])
    return [Chart(metric.title, series, percent=percent)] if series else []


def of_agents(run: Run, base: str, phase: str = "train") -> list[tuple[str, str]]:
    """Return (role, metric name) for each agent's version of a metric."""
    matches = [match for name in run.names(phase) if (match := AGENT.match(name))]
    return [(run.role(int(match[1])), match[0]) for match in matches if match[2] == base]


def smooth(run: Run, phase: str, name: str) -> tuple[list[float], list[float]]:
    xs, ys = run.series(phase, name)
    return xs, smoothed(ys, max(1, len(ys) // 20))


def filled(
    run: Run, phase: str, name: str, smoothly: bool = False
) -> tuple[list[float], list[float]]:
    """Return (environment steps, values) of a share at every record of the phase; 0 if missing."""
    records = [r for r in run.records if r["phase"] == phase]
    ys = [float(r["metrics"].get(name) or 0.0) for r in records]
    window = max(1, len(ys) // 20) if smoothly else 1
    return [float(r["step"]) for r in records], smoothed(ys, window)
