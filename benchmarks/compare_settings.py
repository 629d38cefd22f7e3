"""One choice, the rest alike: held-out reward by scored joint actions and by sampled tokens.

    python benchmarks/compare_settings.py turn_order [--seeds 1 2 3] [--env-steps 3840]
    python benchmarks/compare_settings.py handoff_width
    python benchmarks/compare_settings.py roles --env-steps 2560 --every 10 --answers 4

Every setting of a comparison is trained on the embedded default until it has scored --env-steps
joint actions, the learning rate falling to 0 with them. A Markdown table goes to standard output,
and the curves of all seeds to --figure. Rewards are of the 64 held-out tasks, --answers to each.
Finished runs under --out are read, not repeated; other settings need another --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import yaml
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.stored_results import check_settings
from comlrl.config.algorithms import SECTIONS
from comlrl.loggers.tables import table
from comlrl.run_files import METRICS, SUMMARY

ROOT = Path(__file__).resolve().parents[1]
COMPARISONS: dict[str, dict[str, tuple[str, dict[str, object]]]] = {  # name → file, overrides
    "turn_order": {
        "simultaneous": ("magrpo_quickstart", {"magrpo.top_p": None}),  # as the other one
        "sequential": ("magrpo_sequential_quickstart", {}),
    },
    "handoff_width": {  # tasks a step such that it scores as much: 8 · 16, 5 · 24, 3 · 40
        f"{m} of 8 are continued": (
            "mt_magrpo_quickstart",
            {"magrpo.handoff_width": m, "magrpo.batch_size": tasks},
        )
        for m, tasks in ((1, 8), (2, 5), (4, 3))
    },
    "roles": {  # SHPPO's latents, and one policy that reads its role in the prompt alone
        "learned": ("shppo_quickstart", {}),
        "learned by a policy gradient": ("shppo_quickstart", {"shppo.latent_gradient": "policy"}),
        "zero": ("shppo_quickstart", {"shppo.latents": "zero"}),
        "sampled": ("shppo_quickstart", {"shppo.latents": "sampled"}),
        "lambda_d 0": ("shppo_quickstart", {"shppo.lambda_d": 0.0}),
        "lambda_e 0": ("shppo_quickstart", {"shppo.lambda_e": 0.0}),
        "shared MAPPO": (
            "mappo_quickstart",
            {
                "ppo.shared_policy": True,
                "ppo.top_p": None,
                "ppo.num_generations": 8,
                "ppo.max_new_tokens": 64,
            },
        ),
    },
}
Run = dict[str, list[float]]  # of each evaluation: env_steps, tokens, and its metrics by name


def train(comparison: str, name: str, seed: int, options: argparse.Namespace) -> Path:
    """Train one run of a comparison and return its folder."""
    file, overrides = COMPARISONS[comparison][name]
    section = algorithm(file)
    measured = {
        f"{section}.eval_interval": options.every,
        f"{section}.eval_answers": options.answers,
    }
    folder = options.out.resolve() / f"{comparison}_{name.replace(' ', '_')}_{seed}"
    return trained(file, folder, seed, options.env_steps, overrides | measured)


def algorithm(file: str) -> str:
    """Return the algorithm's section of a shipped configuration."""
    (name,) = SECTIONS.keys() & yaml.safe_load((ROOT / f"configs/{file}.yaml").read_text()).keys()
    return name


def trained(
    file: str, folder: Path, seed: int, env_steps: int, overrides: dict[str, object]
) -> Path:
    """Train a run in ``folder`` for this many scored joint actions; keep a finished run.

    The learning rate falls to 0 over those actions. Raises CalledProcessError if training fails.
    """
    if (folder / SUMMARY).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    name = algorithm(file)
    overrides = {
        "seed": seed, "output.dir": str(folder), "output.save_final_model": False,
        f"{name}.max_steps": None, f"{name}.max_env_steps": env_steps,
        f"{name}.lr_scheduler": "linear",
    } | overrides  # fmt: skip
    subprocess.run(
        [
            sys.executable, f"train_{name}.py", "--config", f"configs/{file}.yaml", "--override",
            *(f"{key}={json.dumps(value)}" for key, value in overrides.items()),
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder


def read(folder: Path) -> Run:
    """Return a run's evaluations, with the joint actions scored and tokens sampled before each."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    sampled = accumulate(
        line["metrics"]["tokens"] if line["phase"] == "train" else 0 for line in lines
    )
    run: Run = {}
    for line, tokens in zip(lines, sampled, strict=True):
        if line["phase"] == "eval":
            values = {"env_steps": line["step"], "tokens": tokens} | line["metrics"]
            for name, value in values.items():
                run.setdefault(name, []).append(value)
    return run


def at(run: Run, axis: str, place: float) -> float:
    """Return the held-out reward at ``place`` on ``axis``, by linear interpolation."""
    return float(np.interp(place, run[axis], run["reward_mean"]))


def conventions(runs: Sequence[Run]) -> str:
    """Return each helper's most frequent final convention, and its share, by seed."""
    parts = []
    for run in runs:
        kinds = {
            name.rpartition("/")[2]: values[-1]
            for name, values in run.items()
            if name.startswith("convention/aux/")
        }
        kind = max(kinds, key=lambda name: kinds[name])
        parts.append(f"{kind} {100 * kinds[kind]:.0f}%")
    return ", ".join(parts)


def row(name: str, runs: Sequence[Run], steps: float, tokens: float) -> list[object]:
    def mean(values: Sequence[float]) -> str:
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.2f}{spread}"

    ends = [f"{run['reward_mean'][0]:.2f} → {run['reward_mean'][-1]:.2f}" for run in runs]
    cells = [name, ", ".join(ends), mean([at(run, "env_steps", steps) for run in runs])]
    cells.append(mean([at(run, "tokens", tokens) for run in runs]))
    cells.append(f"{statistics.fmean(run['tokens'][-1] for run in runs) / 1000:.0f}k")
    cells.append(mean([run["convention_match_rate"][-1] for run in runs]))
    return [*cells, conventions(runs)]


def draw(runs: dict[str, list[Run]], path: Path) -> None:
    """Draw two panels, by scored joint actions and by sampled tokens; one line per run."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, label in zip(
        axes, ("env_steps", "tokens"), ("scored joint actions", "sampled tokens"), strict=True
    ):
        for number, (name, seed_runs) in enumerate(runs.items()):
            for seed, run in enumerate(seed_runs):
                axis.plot(run[key], run["reward_mean"], color=f"C{number}", alpha=0.75,
                          marker=".", label=None if seed else name)  # fmt: skip
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out reward")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", choices=list(COMPARISONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--env-steps", type=int, default=3840, help="scored joint actions of a run")
    parser.add_argument("--every", type=int, default=5, help="training steps between evaluations")
    parser.add_argument("--answers", type=int, default=1, help="to each held-out task")
    parser.add_argument("--out", type=Path, help="default: outputs/compared/COMPARISON")
    parser.add_argument("--figure", type=Path, help="default: COMPARISON.png under --out")
    options = parser.parse_args()
    options.out = options.out or ROOT / "outputs" / "compared" / options.comparison
    names = ("comparison", "env_steps", "every", "answers")
    check_settings(options.out, {name: getattr(options, name) for name in names})
    runs: dict[str, list[Run]] = {name: [] for name in COMPARISONS[options.comparison]}
    for seed in options.seeds:  # seed by seed, so that what is there so far can be compared
        for name in runs:
            runs[name].append(read(train(options.comparison, name, seed, options)))
            print(name, seed, runs[name][-1]["reward_mean"], file=sys.stderr, flush=True)
    steps, tokens = (
        min(run[key][-1] for seed_runs in runs.values() for run in seed_runs)
        for key in ("env_steps", "tokens")
    )
    head = [
        options.comparison, "start → end of each seed", f"at {steps:,} scored",
        f"at {tokens:,.0f} tokens", "tokens", "match at the end", "what aux writes most",
    ]  # fmt: skip
    print(table(head, [row(name, seed_runs, steps, tokens) for name, seed_runs in runs.items()]))
    print(
        f"\nSeeds: {', '.join(map(str, options.seeds))}; 64 tasks, answers to each: "
        f"{options.answers}; mean ± deviation of the seeds."
    )
    draw(runs, options.figure or options.out / f"{options.comparison}.png")


if __name__ == "__main__":
    main()
