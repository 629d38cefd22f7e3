"""The charts of a run's report, by section. Sections without data are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from comlrl.evaluation.metrics import OF_TREES, OF_TURN
from comlrl.loggers.report.chart import GREEN, ORANGE, PINK, PURPLE, Chart, Series
from comlrl.loggers.report.lines import (
    AGENT,
    both_phases,
    filled,
    is_share,
    learning_series,
    metric_chart,
    of_agents,
    reward_ceiling,
    reward_range,
    smooth,
)
from comlrl.loggers.report.run_data import Run
from comlrl.loggers.views.view import Metric, in_words, titled

TURN = re.compile(r"^turn_(\d+)/(.+)$")
ELSEWHERE = re.compile(  # metrics shown in another section, or not worth a chart
    r"^(turn_\d+/|reward/|convention|time/|tasks$|joint_actions|tokens_per|tokens$|turns_mean"
    r"|peak_memory|step_seconds|training_step|tasks_seen|reward_model/accuracy$)"
)
CONVENTION = re.compile(r"^convention/([^/]+)/(.+)$")


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    charts: tuple[Chart, ...]
    note: str = ""


def sections(run: Run) -> list[Section]:
    """Return the report's sections in reading order, without empty ones."""
    makers = (
        _learning, _conventions, _parts, _turns, _behaviour, _tasks, _preferences, _latents,
        _optimisation, _timings,
    )  # fmt: skip
    made = [make(run) for make in makers]
    return [section for section in made if section.charts]


def figures(run: Run) -> dict[str, Chart]:
    """Return the learning curve, reward parts and joint-action shares, if there are any."""
    made = {"reward": _reward(run), "reward_parts": _parts(run).charts, "shares": _shares(run)}
    return {name: charts[0] for name, charts in made.items() if charts}


def _reward(run: Run) -> list[Chart]:
    series = learning_series(run)
    if not series:
        return []
    ceiling = reward_ceiling(run)
    bands = {
        "training": "training, one standard deviation of a step's joint actions",
        "held-out tasks": "held-out tasks, 95% interval of the mean",
    }
    wide = [s for s in series if any(h > y for h, y in zip(s.high_X, s.ys_X, strict=False))]
    labels = [bands[s.label] for s in wide]
    notes = [] if ceiling is None else [f"At most {ceiling:g}."]
    notes += [f"Bands: {'; '.join(labels)}."] if labels else []
    limits = reward_range(series, ceiling)
    return [Chart("Mean reward", series, y_range=limits, wide=True, note=" ".join(notes))]


def _shares(run: Run) -> list[Chart]:
    """Return charts of the shares that the domain's view selects; all shares without a view."""
    any_domain = (Metric(run.view.passed, "pass_rate"), *titled(None, run.all_names))
    title, wanted = run.view.curves
    for phase in ("train", "eval"):
        shares = [
            Series(metric.title, *smooth(run, phase, metric.name), i)
            for i, metric in enumerate(wanted or any_domain)
            if (ys := run.series(phase, metric.name)[1]) and is_share(metric.name, ys)
        ]
        if shares:
            return [Chart(title, shares, percent=True)]
    return []


def _learning(run: Run) -> Section:
    charts = _reward(run)
    if not charts:
        return Section("Learning", ())
    for phase, title in (("train", "training"), ("eval", "held-out tasks")):
        agents = of_agents(run, "reward_mean", phase)
        heading = f"Mean reward of each agent, {title}"
        charts += metric_chart(run, phase, heading, agents, percent=False)
    if run.series("train", "task_reward_mean")[0]:
        pair = [
            Series("model score", *smooth(run, "train", "reward_mean"), PURPLE),
            Series("task reward", *smooth(run, "train", "task_reward_mean"), ORANGE),
        ]
        xs, ys = run.series("eval", "model_score_mean")
        if xs:
            pair.append(Series("model score, held-out tasks", xs, ys, PINK, dots=True))
        note = "A score that rises while the task reward does not is reward hacking."
        charts.append(Chart("Model score and task reward", pair, note=note))
    return Section("Learning", tuple(charts))


def _parts(run: Run) -> Section:
    charts = []
    for phase, title in (("train", "training"), ("eval", "held-out tasks")):
        parts = [
            Series(part.replace("_", " "), *filled(run, phase, f"reward/{part}", smoothly=True), i)
            for i, part in enumerate(run.reward_parts)
        ]
        parts = [part for part in parts if any(part.ys_X)]
        if parts and len(parts[0].xs_X) > 1:
            charts.append(Chart(f"Parts of the reward, {title}", parts, "stacked"))
    return Section("What the reward is made of", tuple(charts))


def _conventions(run: Run) -> Section:
    """Return the section on which convention each agent follows, if several exist."""
    phase = "eval" if any(map(CONVENTION.match, run.names("eval"))) else "train"
    by_role: dict[str, list[str]] = {}
    kinds: dict[str, int] = {}
    for name in run.names(phase):
        if match := CONVENTION.match(name):
            by_role.setdefault(match[1], []).append(match[2])
            kinds.setdefault(match[2], len(kinds))
    charts = []
    for role, names in by_role.items():
        if len(run.series(phase, f"convention/{role}/{names[0]}")[0]) < 2:
            continue
        shares = [
            Series(name.replace("_", " "), *filled(run, phase, f"convention/{role}/{name}"), c)
            for name, c in sorted(((n, kinds[n]) for n in names), key=lambda pair: pair[1])
        ]
        shares = [share for share in shares if any(share.ys_X)]
        if shares:
            title = f"Convention of {role}"
            charts.append(Chart(title, shares, "stacked", percent=True))
    if len(run.series(phase, "convention_match_rate")[0]) > 1:
        agree = Series("agree", *run.series(phase, "convention_match_rate"), GREEN, dots=True)
        charts.append(Chart("Agents that follow the same convention", [agree], percent=True))
    return Section("Learning to agree", tuple(charts), run.view.agreement)


def _turns(run: Run) -> Section:
    turns = sorted({int(m[1]) for name in run.names("train") if (m := TURN.match(name))})
    turns = turns or sorted({int(m[1]) for n in run.names("eval") if (m := TURN.match(n))})
    if len(turns) < 2:
        return Section("Turns", ())
    charts = []
    for phase, title in (("train", "training"), ("eval", "held-out tasks")):
        lines = [
            Series(f"turn {t}", *smooth(run, phase, f"turn_{t}/reward_mean"), i)
            for i, t in enumerate(turns)
        ]
        lines = [line for line in lines if line.xs_X]
        if lines:
            charts.append(Chart(f"Mean reward of each turn, {title}", lines))
    names = [(f"turn {t}", f"turn_{t}/termination_share") for t in turns[:-1]]
    ended = metric_chart(run, "train", "Branches that end early", names)
    return Section("Turns", (*charts, *ended))


def _behaviour(run: Run) -> Section:
    """Return charts of the domain's measures, of lengths, and of truncation and repetition."""
    if run.view.charts is None:
        metrics = (Metric(run.view.passed, "pass_rate"), *titled(None, run.all_names))
        charts = [chart for metric in metrics for chart in both_phases(run, metric)]
    else:
        charts = [
            chart
            for lines in run.view.charts
            for chart in metric_chart(run, lines.phase, lines.title, lines.metrics, lines.percent)
        ]
    lengths = of_agents(run, "completion_length_mean") or [("all", "completion_length_mean")]
    charts += metric_chart(run, "train", "Lengths in tokens", lengths, percent=False)
    ends = [("cut at the limit", "truncation_share"), ("duplicates of siblings", "duplicate_share")]
    charts += metric_chart(run, "train", "Cut or repeated", ends)
    return Section("What the agents do", tuple(charts), run.view.note)


def _tasks(run: Run) -> Section:
    first, last = run.passes()
    before, after = _task_means(first), _task_means(last)
    rows = [(before[task], reward) for task, reward in after.items() if task in before]
    if not rows:
        return Section("Task by task", ())
    rows.sort(key=lambda row: row[::-1])
    values = [v for row in rows for v in row]
    ceiling = reward_ceiling(run)
    high = max(values if ceiling is None else [*values, ceiling])
    old, new = zip(*rows, strict=True)
    chart = Chart(
        "Reward of each task",
        [Series("before", range(len(rows)), old), Series("after", range(len(rows)), new)],
        "change",
        y_range=(min(0.0, *values), high),
        wide=True,
        x_label="tasks, by reward after training",
        note="Hollow: before training; full: after.",
    )
    return Section("Task by task", (chart,))


def _task_means(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return each task's mean reward over its answers."""
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample["task_id"], []).append(sample["reward_task_mean"])
    return {task: sum(values) / len(values) for task, values in rewards.items()}


def _preferences(run: Run) -> Section:
    charts = []
    gaps = run.preferences.get("gaps") or {}
    if total := sum(gaps.values()):
        bins = max(1, min(24, total // 4))
        counted, edges = np.histogram([float(gap) for gap in gaps], bins, weights=[*gaps.values()])
        pairs, label = Series("pairs", edges.tolist(), counted.tolist()), "winner − loser"
        charts.append(Chart("Reward gap of the pairs", [pairs], "bars", x_label=label))
    model = "Reward model: pairs ordered rightly"
    charts += metric_chart(run, "train", model, [("", "reward_model/accuracy")])
    for title, name, percent in (
        ("Pairs ordered rightly by the policies", "dpo/accuracy", True),
        ("Joint margin of the policies", "dpo/margin", False),
    ):
        charts += both_phases(run, Metric(title, name), percent, "held-out pairs")
    return Section("Preferences", tuple(charts))


def _latents(run: Run) -> Section:
    """Return charts of SHPPO's latents on their two principal axes; later ones are more opaque."""
    lines = [line for line in run.latents if len(line["mu"])]
    if len(lines) < 3:
        return Section("Latents", ())
    mu = np.array([line["mu"] for line in lines], dtype=float)
    centred = mu - mu.mean(axis=0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    plane = centred @ axes[:2].T
    if plane.shape[1] < 2:
        plane = np.column_stack([plane, np.zeros(len(plane))])
    explained = float((sizes[:2] ** 2).sum() / max((sizes**2).sum(), 1e-12))
    end = max(line["step"] for line in lines) or 1
    every = max(1, len(lines) // 1200)
    roles = list(dict.fromkeys(str(line["role"]) for line in lines))
    groups = []
    for i, role in enumerate(roles):
        rows = [n for n in range(0, len(lines), every) if str(lines[n]["role"]) == role]
        xs, ys = plane[rows].T.tolist()
        opacity = [lines[n]["step"] / end for n in rows]
        groups.append(Series(role, xs, ys, i, opacity_X=opacity))
    note = f"Two principal axes: {explained:.0%} of the variance. Opaque: late in training."
    chart = Chart("Latents of the roles", groups, "dots", x_label="", note=note)
    return Section("Latents", (chart,))


def _optimisation(run: Run) -> Section:
    """Return charts of all other training metrics; a chart shows all agents together."""
    of_trees = {match[1] for name in run.names("train") if (match := OF_TURN.match(name))}
    bases: dict[str, None] = {}
    for name in run.names("train"):
        match = AGENT.match(name)
        base = match[2] if match and name not in of_trees else name
        if base not in {*of_trees, *OF_TREES} and not ELSEWHERE.match(base):
            bases[base] = None
    charts: list[Chart] = []
    for base in bases:
        names = of_agents(run, base)
        if base in run.names("train"):
            names = [*names, ("all agents" if names else "", base)]
        low = 0.0 if base == "learning_rate" else None
        charts += metric_chart(run, "train", in_words(base), names, percent=False, low=low)
    return Section("Optimisation", tuple(charts))


def _timings(run: Run) -> Section:
    shares = [name for name in run.names("train") if name.startswith("time/")]
    charts: list[Chart] = []
    parts = [
        Series(name[5:].replace("_share", "").replace("_", " "), *filled(run, "train", name), i)
        for i, name in enumerate(shares)
        if name.endswith("_share")
    ]
    if parts and len(parts[0].xs_X) > 1:
        charts.append(Chart("Where the time goes", parts, "stacked", percent=True))
    for title, name in (
        ("Seconds a training step", "step_seconds"),
        ("Joint actions per second", "joint_actions_per_second"),
        ("Tokens per second", "tokens_per_second"),
        ("Peak memory, MB", "peak_memory_mb"),
    ):
        charts += metric_chart(run, "train", title, [("", name)], percent=False, low=0.0)
    return Section("Speed", tuple(charts))
