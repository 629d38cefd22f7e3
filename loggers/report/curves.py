"""Curves for papers and READMEs, drawn by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comlrl.files import replace
from loggers.report.lines import (
    filled,
    is_share,
    learning_series,
    reward_ceiling,
    reward_range,
    smooth,
)
from loggers.report.run_data import Run
from loggers.report.svg import by_sign
from loggers.views.view import Metric, titled

COLOURS = ("#2f6fde", "#dd6b20", "#1b9e77", "#8e4ec6", "#c99700", "#d6409f", "#6a8f1f", "#7b8794")
COLUMN = (3.4, 2.6)  # of a paper; inches
PAPER: dict[Any, Any] = {
    "font.size": 8,
    "pdf.fonttype": 42,
    "lines.linewidth": 1.2,
}  # 42: letters stay letters

Panel = Callable[[Axes], None]  # draws one


def panels(run: Run) -> dict[str, Panel]:
    """Learning curve, parts of the reward and shares of joint actions, where there are any."""
    shares, phase = _shares(run)
    found: dict[str, Panel] = {"reward": lambda axis: _learning(axis, run)}
    if run.reward_parts:
        found["reward_parts"] = lambda axis: _parts(axis, run)
    if shares:
        found["shares"] = lambda axis: _draw_shares(axis, run, phase, shares)
    return found


def write_figures(panels: Mapping[str, Panel], folder: str | Path) -> list[Path]:
    """Each panel by itself, ``NAME.pdf`` and ``NAME.png``, at the width of a paper's column."""
    folder, written = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in panels.items():
        with rc_context(PAPER):
            figure = Figure(figsize=COLUMN, layout="constrained")
            axis = figure.subplots()
            draw(axis)
            axis.set(xlabel="environment steps", ylabel=axis.get_title(), title="")
            plain(axis, legend=False)
            texts = axis.get_legend_handles_labels()[1]
            if len(texts) > 1:
                across = 1 if max(map(len, texts)) > 20 else 3
                figure.legend(loc="outside lower center", frameon=False, fontsize=7, ncols=across)
                figure.set_figheight(COLUMN[1] + 0.14 * math.ceil(len(texts) / across))
            for file in (folder / f"{name}.pdf", folder / f"{name}.png"):
                figure.savefig(file, dpi=300)
                written.append(file)
    return written


def write_curves(run: Run, path: str | Path) -> None:
    """The panels side by side, as a picture."""
    draw = list(panels(run).values())
    figure = Figure(figsize=(13 * len(draw) / 3, 4.4), layout="constrained")
    axes = figure.subplots(1, len(draw), squeeze=False)[0]
    for axis, one in zip(axes, draw, strict=True):
        one(axis)
        plain(axis)
        axis.set_xlabel("environment steps")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    replace(path, drawn.getvalue())


def plain(axis: Axes, legend: bool = True) -> None:
    """No frame above and to the right; a light grid; the legend below."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    if legend and axis.get_legend_handles_labels()[0]:
        axis.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            frameon=False,
            fontsize=8,
            ncols=3,
            columnspacing=1.2,
        )


def _learning(axis: Axes, run: Run) -> None:
    for series in learning_series(run):
        colour = COLOURS[series.colour]
        if series.faint:
            axis.plot(series.xs_X, series.ys_X, color=colour, alpha=0.3, linewidth=0.8)
            continue
        marker = "o" if series.dots else None
        axis.plot(
            series.xs_X, series.ys_X, color=colour, marker=marker, markersize=4, label=series.label
        )
        if len(series.low_X):
            axis.fill_between(series.xs_X, series.low_X, series.high_X, color=colour, alpha=0.12)
    ceiling = reward_ceiling(run)
    if ceiling is not None:
        axis.axhline(ceiling, color="#7b8794", linewidth=0.8, linestyle=":")
        low = reward_range(learning_series(run), ceiling)[0]
        low = axis.get_ylim()[0] if low is None else low
        axis.set_ylim(low, ceiling + 0.03 * (ceiling - low))
    axis.set_title("Mean reward", fontsize=10)


def _parts(axis: Axes, run: Run) -> None:
    phase = "train" if any(name.startswith("reward/") for name in run.names("train")) else "eval"
    parts = [
        (
            COLOURS[i % len(COLOURS)],
            part.replace("_", " "),
            *filled(run, phase, f"reward/{part}", True),
        )
        for i, part in enumerate(run.reward_parts)
    ]
    named = set()
    for sign in (0, 1):
        layers = [(*part[:3], by_sign(part[3])[sign]) for part in parts]
        layers = [layer for layer in layers if any(layer[3])]
        if layers:
            colours, labels, steps, ys = zip(*layers, strict=True)
            once = ["" if label in named else label for label in labels]  # "": not in the legend
            axis.stackplot(steps[0], *ys, labels=once, colors=colours, alpha=0.85)
            named |= set(labels)
    axis.set_title("Parts of the reward", fontsize=10)


def _shares(run: Run) -> tuple[dict[str, Metric], str]:
    """(by colour, what the domain's view wants; of any domain, all shares; the phase)."""
    any_domain = (Metric(run.view.passed, "pass_rate"), *titled(None, run.all_names))
    wanted = run.view.curves[1] or any_domain
    for phase in ("train", "eval"):
        found = {
            COLOURS[i % len(COLOURS)]: metric
            for i, metric in enumerate(wanted)
            if (ys := run.series(phase, metric.name)[1]) and is_share(metric.name, ys)
        }
        if found:
            return found, phase
    return {}, "train"


def _draw_shares(axis: Axes, run: Run, phase: str, shares: Mapping[str, Metric]) -> None:
    for colour, (label, name) in shares.items():
        axis.plot(*smooth(run, phase, name), color=colour, label=label)
    axis.set_ylim(-0.02, 1.02)
    axis.set_title(run.view.curves[0], fontsize=10)
