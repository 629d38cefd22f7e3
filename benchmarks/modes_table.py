"""What feedback is worth: the two-turn quickstart in every external mode, and one turn alone.

    python benchmarks/modes_table.py [--steps 12] [--seeds 42] [--tasks 4] [--generations 8]

Every mode trains from the same weights for the same number of steps and scored joint actions: one
turn alone takes twice the tasks of two turns. The runs are short, so that the learning rate does
not decay in them, and nothing is held against the reference. Held-out rewards before, during and
after come from the runs' own logs and are printed as a Markdown table, the mean over the seeds:
of the first attempts, and of each task's last one (what is solved is not attempted again);
`docs/results/feedback.md` has one. Runs are kept under --out: finished ones are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.run_files import METRICS, SUMMARY
from loggers.tables import table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/mt_magrpo_quickstart.yaml"
ALONE = "one turn"
MODES = ("level_feedback", "level_passed", "passed", "plain")  # expert_edits needs an expert


def settings(mode: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Overrides of the quickstart."""
    alone = mode == ALONE
    shared = {
        "seed": seed,
        "output.save_final_model": False,
        "magrpo.max_steps": options.steps,
        "magrpo.lr_scheduler": "constant",
        "magrpo.kl_coef": 0.0,
        "magrpo.max_new_tokens": 64,
        "magrpo.eval_interval": options.every,
        "magrpo.num_generations": options.generations,
        "magrpo.batch_size": 2 * options.tasks if alone else options.tasks,
    }
    if alone:
        return shared | {"magrpo.num_turns": 1, "magrpo.handoff": None}
    return shared | {"external.mode": mode, "magrpo.handoff": "random"}


def train(mode: str, seed: int, options: argparse.Namespace) -> Path:
    """The run's folder, finished. Raises CalledProcessError where training fails."""
    folder = options.out / f"{mode.replace(' ', '_')}_{seed}"
    if (folder / SUMMARY).exists():
        return folder
    overrides = settings(mode, seed, options) | {"output.dir": str(folder)}
    subprocess.run(
        [
            sys.executable, "train_magrpo.py", "--config", CONFIG, "--override",
            *(f"{key}={json.dumps(value)}" for key, value in overrides.items()),
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder


def curve(folder: Path, name: str) -> dict[int, float]:
    """Training step → a held-out metric."""
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    evaluations = [line["metrics"] for line in lines if line["phase"] == "eval"]
    return {int(m["training_step"]): m[name] for m in evaluations}


def rows(mode: str, folders: Sequence[Path]) -> list[list[object]]:
    """A row for each attempt: the reward at every evaluation, and the pass rate at the last one."""
    found: list[list[object]] = []
    attempts = {"first": "turn_1/"} if mode == ALONE else {"first": "turn_1/", "last": ""}
    for attempt, prefix in attempts.items():
        rewards = [curve(folder, f"{prefix}reward_mean") for folder in folders]
        passed = [curve(folder, f"{prefix}pass_rate") for folder in folders]
        means = [f"{mean([each[step] for each in rewards]):.2f}" for step in sorted(rewards[0])]
        share = mean([each[max(each)] for each in passed])
        found.append([mode, attempt, *means, f"{100 * share:.0f} %"])
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="training steps of a run")
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--tasks", type=int, default=4, help="tasks of a step; one turn: twice")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--modes", nargs="+", default=[*MODES, ALONE], choices=[*MODES, ALONE])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "modes")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out = options.out.resolve()
    body: list[list[object]] = []
    for mode in options.modes:
        body += rows(mode, [train(mode, seed, options) for seed in options.seeds])
    steps = [*range(0, options.steps, options.every), options.steps]
    print(table(["mode", "attempt", *(f"step {s}" for s in steps), "all tests pass"], body))
    print(
        f"Seeds: {', '.join(map(str, options.seeds))}. A step scores "
        f"{2 * options.tasks * options.generations} joint actions."
    )


if __name__ == "__main__":
    main()
