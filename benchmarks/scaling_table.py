"""Teams of another size than the trained one: SHPPO of N agents as M, beside one shared policy.

    python -m tools.tiny_coder.pretrain --long
    python benchmarks/scaling_table.py [--seeds 1 2 3] [--trained 2 3 4] [--sizes 1 2 3 4 5]

On `builtin:coopmini-long`, where up to four helpers have something to do, with the model that the
first command makes. SHPPO is trained with each N, parameter-shared MAPPO with each M, as in
`compare_settings.py roles`. SHPPO's policies, and MAPPO's of the first N, then act as every M;
MAPPO's others as their own. A Markdown table of the share of held-out answers that pass all tests
goes to standard output (rewards of one agent and of a team have different maxima), a heat map to
--figure. Runs and evaluations are kept under --out: finished ones are read, not repeated.

The noise floor is that of `compare_runs.py`: s is the standard deviation between three evaluations
of one cell with other keys, and two cells of n seeds differ by more than it beyond 2 s √(2/n).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.compare_settings import COMPARISONS, ROOT, algorithm, trained
from loggers.tables import table
from trainers.launch.commands.evaluate import main as evaluate

KINDS = {"SHPPO": "learned", "shared MAPPO": "shared MAPPO"}  # as `compare_settings.py roles` has
TASK = {
    "agent_model.name": str(ROOT / "outputs" / "tiny_coder_long"),
    "dataset.name": "builtin:coopmini-long",
}
KEYS = (101, 102, 103)  # of the evaluations that tell the noise
Cell = list[float]  # of each seed


def train(kind: str, agents: int, seed: int, options: argparse.Namespace) -> Path:
    """The run's folder, finished."""
    file, overrides = COMPARISONS["roles"][KINDS[kind]]
    own = {
        f"{algorithm(file)}.num_agents": agents, f"{algorithm(file)}.eval_interval": 0,
        "output.save_final_model": True,
    }  # fmt: skip
    folder = options.out.resolve() / f"{kind.replace(' ', '_')}_{agents}_{seed}"
    return trained(file, folder, seed, options.env_steps, overrides | TASK | own)


def passes(team: Sequence[str], agents: int, samples: int, out: Path) -> float:
    """The share of answers to the held-out tasks that pass all tests, given as so many agents.

    ``team``: the options of evaluate.py that name what to evaluate.
    """
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        size = ["--num-agents", str(agents), "--samples", str(samples), "--k", "1"]
        with redirect_stdout(sys.stderr):
            if evaluate([*team, *size, "--out", str(out)]):
                raise SystemExit(2)
    return json.loads(out.read_text())["metrics"]["pass@1"]


def cell(kind: str, trained_with: int, agents: int, options: argparse.Namespace) -> Cell:
    """Of each seed's policy."""
    runs = [train(kind, trained_with, seed, options) for seed in options.seeds]
    return [
        passes(["--checkpoint", str(run)], agents, options.samples, run / f"as_{agents}.json")
        for run in runs
    ]


def untrained(agents: int, options: argparse.Namespace) -> Cell:
    """The base model, sampled as the runs sample."""
    file, overrides = COMPARISONS["roles"][KINDS["shared MAPPO"]]
    settings = [f"{key}={json.dumps(value)}" for key, value in (overrides | TASK).items()]
    team = ["--config", str(ROOT / f"configs/{file}.yaml"), "--override", *settings]
    return [
        passes(team, agents, options.samples, options.out.resolve() / f"untrained_{agents}.json")
    ]


def noise(options: argparse.Namespace) -> float:
    """s: the standard deviation of one evaluation between keys, of the first seed's first SHPPO."""
    agents = options.trained[0]
    run = train("SHPPO", agents, options.seeds[0], options)
    return statistics.stdev(
        passes(
            ["--checkpoint", str(run), "--override", f"seed={key}"],
            agents,
            options.samples,
            run / f"as_{agents}_key_{key}.json",
        )
        for key in KEYS
    )


def draw(rows: dict[str, list[Cell]], sizes: Sequence[int], path: Path) -> None:
    """A heat map of the means."""
    figure = Figure(figsize=(1.6 + 0.9 * len(sizes), 1 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    means = np.array([[statistics.fmean(cell) for cell in cells] for cells in rows.values()])
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
    parser.add_argument("--env-steps", type=int, default=1920, help="scored joint actions of a run")
    parser.add_argument("--samples", type=int, default=4, help="answers to each held-out task")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "scaling")
    parser.add_argument("--figure", type=Path, help="default: scaling.png under --out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rows = {"untrained": [untrained(m, options) for m in options.sizes]}
    for kind, numbers in (("SHPPO", options.trained), ("shared MAPPO", options.trained[:1])):
        for n in numbers:
            rows[f"{kind}, trained with {n}"] = [cell(kind, n, m, options) for m in options.sizes]
    rows["shared MAPPO, trained with each"] = [
        cell("shared MAPPO", m, m, options) for m in options.sizes
    ]
    body = [[name, *map(text, cells)] for name, cells in rows.items()]
    print(table(["all tests pass", *(f"as {m}" for m in options.sizes)], body))
    s, seeds = noise(options), len(options.seeds)
    print(
        f"\nSeeds: {', '.join(map(str, options.seeds))}, mean ± deviation of the seeds. One "
        f"evaluation between keys: s = {s:.3f}; noise floor of a difference of two cells: "
        f"{2 * s * math.sqrt(2 / seeds):.3f}."
    )
    draw(rows, options.sizes, options.figure or options.out / "scaling.png")


def text(cell: Cell) -> str:
    spread = f" ± {statistics.stdev(cell):.2f}" if len(cell) > 1 else ""
    return f"{statistics.fmean(cell):.2f}{spread}"


if __name__ == "__main__":
    main()
