"""Draws the diagrams of the pages: the loop, an episode, joint actions as grids, and GPUs.

    python tools/draw_diagrams.py RUN [--task CoopMini/eval/5] [--out docs]

RUN is a finished run of ``configs/magrpo_quickstart.yaml``; the episode is one of its held-out
tasks, before and after training. The grids are the joint actions that the trainer scores.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from comlrl.rollout.grow import _joint_actions  # noqa: E402
from comlrl.run_files import SAMPLES  # noqa: E402

INK, SOFT, FILL = "#1f2933", "#7b8794", "#f5f7fa"
AUX, MAIN, GOOD = "#0b6e99", "#b44d12", "#1b9e77"
COUNT = 4  # completions in a grid


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure whose coordinates are inches from the lower left."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str = "",
    colour: str = INK, **look: Any,
) -> None:  # fmt: skip
    style = "round,pad=0,rounding_size=0.08"
    shape = FancyBboxPatch((x, y), width, height, style, fc=FILL, ec=colour, lw=1.2)
    axes.add_patch(shape)
    top = y + height - 0.12
    axes.text(x + 0.12, top, title, va="top", fontsize=9.5, weight="bold", color=colour)
    words: dict[str, Any] = {"fontsize": 8, "color": INK, "linespacing": 1.35}
    axes.text(x + 0.12, top - 0.26, text, va="top", **words | look)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **bend: Any) -> None:
    look = {"arrowstyle": "-|>", "color": SOFT, "lw": 1.4, "shrinkA": 0, "shrinkB": 0} | bend
    axes.annotate("", end, start, arrowprops=look)


def loop(_: Path, task: str) -> Figure:
    figure, axes = canvas(9.2, 3.25)
    for x, title, text, colour in (
        (0.1, "1  Tasks", "batch_size rows\nof the data set", INK),
        (1.95, "2  Prompts", "one for each agent:\naux and main read\ndifferent words", INK),
        (3.8, "3  Completions", "G of each agent,\nsampled in one batch", INK),
        (5.65, "4  Joint actions", "one completion of each\nagent is one program", INK),
        (7.5, "5  Reward", "one number for\neach joint action;\ncode in a sandbox", GOOD),
    ):
        box(axes, x, 2.05, 1.6, 1.1, title, text, colour)
    for x in (1.7, 3.55, 5.4, 7.25):
        arrow(axes, (x + 0.02, 2.6), (x + 0.23, 2.6))
    box(
        axes,
        7.5,
        0.15,
        1.6,
        1.3,
        "6  Credit",
        "a completion's mean\nreward minus that of\nits siblings",
    )
    box(
        axes,
        5.65,
        0.15,
        1.6,
        1.3,
        "7  Update",
        "one optimizer and\none gradient step\nfor each agent",
    )
    box(axes, 2.6, 0.15, 2.8, 1.3, "The team", "")
    for x, y, width, text, colour in (
        (2.75, 0.62, 1.2, "adapter of aux", AUX), (4.05, 0.62, 1.2, "adapter of main", MAIN),
        (2.75, 0.24, 2.5, "one frozen base model", SOFT),
    ):  # fmt: skip
        axes.add_patch(Rectangle((x, y), width, 0.3, fc="white", ec=colour, lw=1.0))
        axes.text(x + width / 2, y + 0.15, text, ha="center", va="center", fontsize=8, color=colour)
    arrow(axes, (8.3, 2.03), (8.3, 1.47))
    arrow(axes, (7.48, 0.8), (7.27, 0.8))
    arrow(axes, (5.63, 0.8), (5.42, 0.8))
    arrow(axes, (4.4, 1.47), (4.4, 2.03))
    axes.text(4.5, 1.75, "the next step samples from the updated agents", fontsize=8, color=SOFT)
    return figure


def episode(run: Path, task: str) -> Figure:
    lines = [json.loads(line) for line in (run / SAMPLES).read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["phase"] == "eval" and line["task_id"] == task]
    before, after = lines[0], lines[-1]
    figure, axes = canvas(9.2, 4.15)
    problem = "\n".join(line.strip() for line in before["problem"].strip().splitlines()[:4])
    box(
        axes,
        0.1,
        2.75,
        2.5,
        1.3,
        "Both read the problem",
        problem,
        family="monospace",
        fontsize=7.2,
    )
    for y, colour, text in (
        (2.55, AUX, "aux is to write a helper that\nreturns something useful"),
        (2.05, MAIN, "main is to write the function,\nwhich may call aux"),
        (1.55, INK, "Neither reads what the other writes."),
        (0.45, SOFT, "builtin:tiny-coder (2.5M), CPU,\nmagrpo_quickstart.yaml, seed 42"),
    ):
        axes.text(0.12, y, text, va="top", fontsize=8, color=colour, linespacing=1.35)
    for y, when, sample in ((2.15, "Before training", before), (0.1, "After 40 steps", after)):
        code = {"family": "monospace", "fontsize": 7.2}
        aux, main = sample["completions_N"]
        box(axes, 2.8, y, 6.3, 1.9, f"{when}: reward {sample['reward']:.1f} of 4.0",
            colour=GOOD if sample["passed"] else SOFT)  # fmt: skip
        box(axes, 2.92, y + 0.48, 2.95, 1.02, "aux writes", aux, AUX, **code)
        box(axes, 6.0, y + 0.48, 2.98, 1.02, "main writes", main, MAIN, **code)
        axes.text(2.95, y + 0.23, parts(sample), va="center", fontsize=8, color=INK)
    return figure


def parts(sample: dict[str, Any]) -> str:
    """Return the terms of the reward, in words."""
    names = {
        "aux_defined": "aux defined", "main_defined": "main defined", "syntax": "compiles",
        "tests": "tests", "uses_aux": "calls aux", "not_wrapper": "does work itself",
    }  # fmt: skip
    terms = [f"{names[n]} {sample['parts'][n]:g}" for n in names if sample["parts"][n]]
    return " + ".join(terms) or "no term of the reward is won"


def grids(_: Path, task: str) -> Figure:
    figure = Figure(figsize=(9.2, 2.75), layout="constrained")
    below = [(g, 2 * g + answer) for g in range(COUNT) for answer in (0, 1)]
    drawn: list[tuple[str, str, Sequence[tuple[int, ...]], int]] = [
        ("align", "", _joint_actions("align", 2, COUNT), COUNT),
        ("cross", "", _joint_actions("cross", 2, COUNT), COUNT),
        ("counterfactual", ", with aux2’s 2nd", _joint_actions("counterfactual", 3, COUNT), COUNT),
        ("sequential: two of main for each of aux", "", below, 2 * COUNT),
    ]
    for axes, (title, third, actions, columns) in zip(
        figure.subplots(1, 4, width_ratios=(1, 1, 1, 2)), drawn, strict=True
    ):
        shown = {action[:2] for action in actions if len(action) == 2 or action[2] == 1}
        for row in range(COUNT):
            for column in range(columns):
                colour = GOOD if (row, column) in shown else FILL
                axes.add_patch(Rectangle((column, row), 1, 1, fc=colour, ec="white", lw=2))
        axes.set(xlim=(0, columns), ylim=(COUNT, 0), aspect="equal")
        axes.set_xticks([i + 0.5 for i in range(columns)], range(1, columns + 1))
        axes.set_yticks([i + 0.5 for i in range(COUNT)], range(1, COUNT + 1))
        axes.tick_params(length=0, labelsize=8, labelcolor=SOFT)
        axes.spines[:].set_visible(False)
        head = f"{title}\n{len(actions[0])} agents, {len(actions)} joint actions"
        axes.set_title(head, fontsize=9, color=INK)
        axes.set_xlabel(f"completion of main{third}", fontsize=8, color=MAIN)
        axes.set_ylabel("completion of aux", fontsize=8, color=AUX)
    return figure


def gpus(_: Path, task: str) -> Figure:
    figure, axes = canvas(9.2, 3.0)
    panels: Sequence[tuple[float, str, str, Sequence[Sequence[str]]]] = (
        (0.1, "replicate (default)", "each process samples its share\nof the tasks and has a copy",
         [["base", "aux", "main"]] * 2),
        (3.2, "agent_devices", "one process, two base models:\neach agent on a GPU",
         [["base of aux", "aux"], ["base of main", "main"]]),
        (6.3, "fsdp", "each layer is split over the GPUs\nand gathered while it computes",
         [["½ base", "½ aux", "½ main"]] * 2),
    )  # fmt: skip
    for x, title, text, devices in panels:
        axes.text(x, 2.92, title, va="top", fontsize=9.5, weight="bold", color=INK)
        axes.text(x, 2.68, text, va="top", fontsize=8, color=INK, linespacing=1.35)
        for i, held in enumerate(devices):
            left = x + 1.42 * i
            box(axes, left, 0.15, 1.3, 2.0, f"GPU {i}")
            for row, name in enumerate(held):
                colour = SOFT if "base" in name else AUX if "aux" in name else MAIN
                bottom = 0.28 + 0.5 * (len(held) - 1 - row)
                axes.add_patch(Rectangle((left + 0.12, bottom), 1.06, 0.4, fc="white", ec=colour))
                axes.text(left + 0.65, bottom + 0.2, name, ha="center", va="center", fontsize=8,
                          color=colour)  # fmt: skip
    return figure


DIAGRAMS: dict[str, Callable[[Path, str], Figure]] = {
    "loop": loop, "episode": episode, "grids": grids, "gpus": gpus,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--task", default="CoopMini/eval/5")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    for name, drawing in DIAGRAMS.items():
        drawn = io.BytesIO()
        drawing(options.run, options.task).savefig(drawn, dpi=130)
        few = Image.open(drawn).convert("RGB").quantize(64)  # colours: a third of the bytes
        few.save(options.out / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
