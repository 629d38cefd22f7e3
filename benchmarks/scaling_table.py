"""Teams of another size than the trained one: SHPPO of N agents as M, beside one shared policy.

    python benchmarks/scaling_table.py [--seeds 1 2 3] [--trained 2 3 4] [--sizes 1 2 3 4 5]

SHPPO is trained with each N, parameter-shared MAPPO with each M, as in `compare_settings.py roles`.
SHPPO's policies, and MAPPO's of the first N, then act as every M; MAPPO's others as their own. A
Markdown table of the share of held-out answers that pass all tests goes to standard output
(rewards of one agent and of a team have different maxima), a heat map to --figure. Runs and
evaluations are kept under --out: finished ones are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compare_settings import COMPARISONS, ROOT, algorithm, trained
from loggers.tables import table

KINDS = {"SHPPO": "learned", "shared MAPPO": "shared MAPPO"}  # as `compare_settings.py roles` has
Cell = tuple[float, float]  # mean, standard error over tasks


def train(kind: str, agents: int, seed: int, options: argparse.Namespace) -> Path:
    """The run's folder, finished."""
    file, overrides = COMPARISONS["roles"][KINDS[kind]]
    own = {
        f"{algorithm(file)}.num_agents": agents, f"{algorithm(file)}.eval_interval": 0,
        "output.save_final_model": True,
    }  # fmt: skip
    folder = options.out.resolve() / f"{kind.replace(' ', '_')}_{agents}_{seed}"
    return trained(file, folder, seed, options.env_steps, overrides | own)


def passes(run: Path, agents: int, samples: int) -> list[float]:
    """Each held-out task's share of answers that pass all tests, given as so many agents."""
    out = run / f"as_{agents}.json"
    if not out.exists():
        subprocess.run(
            [
                sys.executable, "evaluate.py", "--checkpoint", str(run), "--num-agents",
                str(agents), "--samples", str(samples), "--k", "1", "--out", str(out),
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return [task["pass@1"] for task in json.loads(out.read_text())["per_task"]]


def cell(kind: str, trained_with: int, agents: int, options: argparse.Namespace) -> Cell:
    """Over all seeds' policies."""
    of_seeds = [
        passes(train(kind, trained_with, seed, options), agents, options.samples)
        for seed in options.seeds
    ]
    of_tasks = [statistics.fmean(task) for task in zip(*of_seeds, strict=True)]
    return statistics.fmean(of_tasks), statistics.stdev(of_tasks) / len(of_tasks) ** 0.5


def draw(rows: dict[str, list[Cell]], sizes: Sequence[int], path: Path) -> None:
    """A heat map of the means."""
    figure = Figure(figsize=(1.6 + 0.9 * len(sizes), 1 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    means = np.array([[mean for mean, _ in cells] for cells in rows.values()])
    image = axes.imshow(means, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (y, x), mean in np.ndenumerate(means):
        axes.text(x, y, f"{mean:.2f}", ha="center", va="center",
                  color="white" if mean < 0.6 else "black")  # fmt: skip
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("agents at evaluation")
    figure.colorbar(image, label="all tests pass")
    figure.savefig(path, dpi=130)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--trained", type=int, nargs="+", default=[2, 3, 4], help="SHPPO's N")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="M")
    parser.add_argument("--env-steps", type=int, default=2560, help="scored joint actions of a run")
    parser.add_argument("--samples", type=int, default=4, help="answers to each held-out task")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "scaling")
    parser.add_argument("--figure", type=Path, help="default: scaling.png under --out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rows: dict[str, list[Cell]] = {}
    for kind, numbers in (("SHPPO", options.trained), ("shared MAPPO", options.trained[:1])):
        for n in numbers:
            rows[f"{kind}, trained with {n}"] = [cell(kind, n, m, options) for m in options.sizes]
    rows["shared MAPPO, trained with each"] = [
        cell("shared MAPPO", m, m, options) for m in options.sizes
    ]
    body = [[name, *(f"{a:.2f} ± {b:.2f}" for a, b in cells)] for name, cells in rows.items()]
    print(table(["all tests pass", *(f"as {m}" for m in options.sizes)], body))
    print(f"\nSeeds: {', '.join(map(str, options.seeds))}; ±: standard error over the tasks.")
    draw(rows, options.sizes, options.figure or options.out / "scaling.png")


if __name__ == "__main__":
    main()
