"""Curves for papers and READMEs, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loggers.report.lines import filled, learning_series, reward_ceiling
from loggers.report.run_data import Run
from loggers.report.svg import smoothed

COLOURS = ("#2f6fde", "#dd6b20", "#1b9e77", "#8e4ec6", "#c99700", "#d6409f", "#6a8f1f", "#7b8794")


def write_curves(run: Run, path: str | Path) -> None:
    """Learning curve, parts of the reward and what the code does, side by side, as a picture."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    axes = figure.subplots(1, 3)
    _learning(axes[0], run)
    _parts(axes[1], run)
    _code(axes[2], run)
    for axis in axes:
        plain(axis)
        axis.set_xlabel("environment steps")
    figure.savefig(path, dpi=150)


def plain(axis: Axes) -> None:
    """No frame above and to the right; a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.6)
    if axis.get_legend_handles_labels()[0]:
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
    if ceiling:
        axis.axhline(ceiling, color="#7b8794", linewidth=0.8, linestyle=":")
        axis.set_ylim(0, ceiling * 1.03)
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
    for sign in (1, -1):
        layers = [part for part in parts if sign * sum(part[3]) > 0]
        if layers:
            colours, labels, steps, ys = zip(*layers, strict=True)
            axis.stackplot(steps[0], *ys, labels=labels, colors=colours, alpha=0.85)
    axis.set_title("Parts of the reward", fontsize=10)


def _code(axis: Axes, run: Run) -> None:
    names = (
        ("all tests pass", "pass_rate"),
        ("compiles", "syntax_rate"),
        ("aux called", "aux_called_rate"),
        ("aux needed", "aux_needed_rate"),
        ("thin wrapper", "wrapper_rate"),
    )
    phase = "train" if run.series("train", "pass_rate")[0] else "eval"
    for i, (label, name) in enumerate(names):
        xs, ys = run.series(phase, name)
        if xs:
            axis.plot(xs, smoothed(ys, max(1, len(ys) // 20)), color=COLOURS[i], label=label)
    axis.set_ylim(-0.02, 1.02)
    axis.set_title("Share of programs", fontsize=10)
