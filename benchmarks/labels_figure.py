"""All algorithms on one axis: labelled joint actions against held-out reward.

    python benchmarks/labels_figure.py [--seeds 1 2 3] [--only magrpo madpo] [--out FOLDER]

Draws the runs that `results_table.py` makes (finished ones under --out are read, not repeated): the
mean over the seeds and the range from the least to the largest, and below them the share of joint
actions whose conventions match. A label is a joint action that the task reward, or a comparator,
has judged for the learner: with MARLHF those of its preferences alone, since the reward model
scores what its policies sample afterwards. Writes `labels.png` and `labels.svg` under --out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results_table import QUICKSTARTS, ROOT, run
from comlrl.run_files import METRICS

SHOWN = {"reward_mean": "held-out reward", "convention_match_rate": "conventions match"}
LABELLED = "preferences/labelled"


def curve(folder: Path, name: str) -> list[tuple[float, float]]:
    """(labelled joint actions, held-out value) of each evaluation that has it."""
    labelled: float | None = None
    points = []
    for line in (folder / METRICS).read_text().splitlines():
        record = json.loads(line)
        metrics = record["metrics"]
        labelled = metrics.get(LABELLED, labelled)
        if record["phase"] == "eval" and name in metrics:
            points.append((record["step"] if labelled is None else labelled, metrics[name]))
    return points


def draw(folders: dict[str, list[Path]], file: Path) -> None:
    """One panel for each of ``SHOWN``, one line for each algorithm."""
    figure, panels = pyplot.subplots(len(SHOWN), sharex=True, figsize=(8, 8))
    for panel, (name, label) in zip(panels, SHOWN.items(), strict=True):
        for algorithm, runs in folders.items():
            curves = [curve(folder, name) for folder in runs]
            if not all(curves):
                continue
            x = [point[0] for point in curves[0]]
            values = [[value for _, value in each] for each in zip(*curves, strict=True)]
            means = [sum(each) / len(each) for each in values]
            (line,) = panel.plot(x, means, marker=".", label=algorithm)
            low, high = [min(each) for each in values], [max(each) for each in values]
            panel.fill_between(x, low, high, alpha=0.15, color=line.get_color())
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[0].legend()
    panels[-1].set_xlabel("labelled joint actions")
    figure.tight_layout()
    for kind in (".png", ".svg"):
        figure.savefig(file.with_suffix(kind))
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=list(QUICKSTARTS), choices=list(QUICKSTARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "results")
    parser.set_defaults(answers=None, jobs=1, override=[])  # what `run` reads besides
    options = parser.parse_args(argv)
    out = options.out = options.out.resolve()
    folders: dict[str, list[Path]] = {}
    for name in options.only:
        for seed in options.seeds:
            run(name, seed, options)
            folders.setdefault(name, []).append(out / f"{name}_{seed}")
    draw(folders, out / "labels")
    print(out / "labels.png")


if __name__ == "__main__":
    main()
