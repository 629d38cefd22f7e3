"""Does a centralized critic pay where rewards are sparse or tasks take several turns?
(CoLLM, arXiv 2601.21972, says so.)

    python benchmarks/critics_table.py [--seeds 1 2 3] [--only dense-1 sparse-2] [--env-steps 1984]
        [--out DIR]

Three teams on the embedded problems: IPPO by turns (each agent's critic reads what its agent reads,
as CoLLM-DC's), MAPPO (one critic of what both read, as CoLLM-CC's) and MAGRPO (no critic). Rewards
are the published one (dense), or 1 where all tests pass and else 0 (sparse, `tests_only.py`); turns
are one, or two with feedback between them. Every run has the same scored joint actions (half of
those of MAPPO's quickstart) at the rates of its quickstart: steps of 16 tasks, four of each, or
with two turns of 8, four of each at either turn (MAGRPO hands one on, of which it draws four; each
of PPO's is continued by one more). The table has the share of held-out tasks solved at the end: 64
tasks, four answers each, a standard error of about 0.03.

36 runs of two to four minutes on two cores with the default; finished ones under --out are read,
not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.run_files import SUMMARY
from loggers.tables import table

ROOT = Path(__file__).resolve().parents[1]
TEAMS = {"IPPO": ("ppo", "ippo"), "MAPPO": ("ppo", "mappo"), "MAGRPO": ("magrpo", "magrpo")}
REWARDS = {"dense": [], "sparse": ["reward.target=benchmarks.tests_only:TestsOnly"]}
SOLVED = {"dense": 3.9, "sparse": 0.9}  # above it no second attempt is made
CELLS = [f"{reward}-{turns}" for turns in (1, 2) for reward in REWARDS]


def overrides(team: str, cell: str, env_steps: int) -> list[str]:
    """What a run says beside its quickstart."""
    (algorithm, _), (reward, turns) = TEAMS[team], cell.split("-")
    keys: dict[str, object] = {
        "num_turns": turns, "num_generations": 4, "batch_size": 16 if turns == "1" else 8,
        "max_steps": "null", "max_env_steps": env_steps, "eval_interval": 1000, "eval_answers": 4,
    }  # fmt: skip
    more = list(REWARDS[reward])
    if algorithm == "ppo":
        keys |= {"granularity": "turn", "kl_coef": 0}
    if turns == "2":
        keys["early_termination_threshold"] = SOLVED[reward]
        keys |= {"handoff": "random"} if algorithm == "magrpo" else {}
        more.append("external.mode=level_feedback")
    return [*(f"{algorithm}.{key}={value}" for key, value in keys.items()), *more]


def solved(team: str, cell: str, seed: int, env_steps: int, out: Path) -> float:
    """The share of held-out tasks whose tests all pass at the end of a run."""
    (algorithm, config), folder = TEAMS[team], out / f"{team.lower()}_{cell}_{env_steps}_{seed}"
    if not (folder / SUMMARY).exists():
        command = [
            sys.executable, f"train_{algorithm}.py", "--config",
            f"configs/{config}_quickstart.yaml", "--override", f"seed={seed}",
            f"output.dir={folder}", "output.overwrite=true", *overrides(team, cell, env_steps),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / SUMMARY).read_text())
    return summary["eval_end"]["pass_rate"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=CELLS, choices=CELLS)
    parser.add_argument("--env-steps", type=int, default=1984, help="scored joint actions")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "critics")
    options = parser.parse_args()
    rows, out = [], options.out.resolve()
    for cell in options.only:
        row: list[object] = [*cell.split("-")]
        for team in TEAMS:
            shares = [solved(team, cell, seed, options.env_steps, out) for seed in options.seeds]
            each = ", ".join(f"{share:.2f}" for share in shares)
            row.append(f"{statistics.fmean(shares):.2f} ({each})")
        rows.append(row)
    print(table(["reward", "turns", *TEAMS], rows))
    print(f"\nSeeds: {', '.join(map(str, options.seeds))}.")


if __name__ == "__main__":
    main()
