"""The quickstarts over several seeds: held-out reward before and after training.

    python benchmarks/results_table.py [--seeds 1 2 3] [--only magrpo ppo] [--override a.b=c]
    python benchmarks/results_table.py --seeds 11 12 13 14 15 16 17 18 19 20 --answers 4 \\
        --only magrpo mt_magrpo magrpo_sequential ippo mappo shppo madpo marlhf magrpo_writing \\
        --out outputs/ten_seeds [--jobs 2]

Each run is a whole `python train_X.py --config configs/X_quickstart.yaml` with its seed. Rewards
are the means over the held-out tasks in the runs' own `summary.json`; with --answers they are
measured before the first step and after the last alone, with so many answers to each task. The
table goes to standard output. The same command continues where it was stopped: finished runs under
--out are read, not repeated; other --answers and --override need another --out. With --jobs several
runs share the machine, each on one thread; their seconds are then no measure of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.stored_results import check_settings
from comlrl.loggers.tables import table
from comlrl.run_files import SUMMARY

ROOT = Path(__file__).resolve().parents[1]
QUICKSTARTS = {
    "magrpo": "magrpo", "mt_magrpo": "magrpo", "magrpo_sequential": "magrpo", "grpo": "grpo",
    "ppo": "ppo", "ippo": "ppo", "mappo": "ppo", "shppo": "shppo", "madpo": "madpo",
    "marlhf": "marlhf", "magrpo_writing": "magrpo",
}  # fmt: skip
ENDS_ALONE = 1_000_000  # steps between evaluations: none but the first and the last


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the held-out rewards before and after, and the seconds of the command.

    Raises CalledProcessError where training fails.
    """
    folder, algorithm = options.out / f"{name}_{seed}", QUICKSTARTS[name]
    if not (folder / "seconds").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        items = [f"seed={seed}", f"output.dir={folder}", *options.override]
        if options.answers is not None:
            items += [
                f"{algorithm}.eval_answers={options.answers}",
                f"{algorithm}.eval_interval={ENDS_ALONE}",
            ]
        threads = {"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {}
        started = time.monotonic()
        subprocess.run(
            [
                sys.executable, f"train_{algorithm}.py",
                "--config", f"configs/{name}_quickstart.yaml", "--override", *items,
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | threads,
        )  # fmt: skip
        (folder / "seconds").write_text(str(time.monotonic() - started))
    summary = json.loads((folder / SUMMARY).read_text())
    rewards = {at: summary[f"eval_{at}"]["reward_mean"] for at in ("start", "end")}
    print(name, seed, json.dumps(rewards), file=sys.stderr, flush=True)
    return rewards | {"seconds": float((folder / "seconds").read_text())}


def row(name: str, seeds: Sequence[int], runs: Sequence[dict[str, float]]) -> list[object]:
    """Return median, minimum and maximum of the final rewards, and further columns.

    These are the initial median, every seed's final reward, and the longest run.
    """
    ends = [run["end"] for run in runs]
    least = min(ends)
    return [
        f"`{name}`",
        f"{statistics.median(run['start'] for run in runs):.2f}",
        f"{statistics.median(ends):.2f}",
        f"{least:.2f} (seed {seeds[ends.index(least)]})",
        f"{max(ends):.2f}",
        ", ".join(f"{end:.2f}" for end in ends),
        f"{max(run['seconds'] for run in runs):.0f} s",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=list(QUICKSTARTS), choices=list(QUICKSTARTS))
    parser.add_argument("--answers", type=int, help="to each held-out task, before and after alone")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "results")
    parser.add_argument("--override", nargs="+", default=[], help="of every run")
    options = parser.parse_args()
    options.out = options.out.resolve()
    return options


def main() -> None:
    options = parse()
    check_settings(options.out, {"answers": options.answers, "override": options.override})
    jobs = [(name, seed) for name in options.only for seed in options.seeds]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(
            zip(jobs, pool.map(lambda job: run(job[0], job[1], options), jobs), strict=True)
        )
    head = ["quickstart", "start", "median", "least", "most", "end of each seed", "longest run"]
    rows = [
        row(name, options.seeds, [results[name, seed] for seed in options.seeds])
        for name in options.only
    ]
    print(table(head, rows))
    print(f"Seeds: {', '.join(map(str, options.seeds))}; answers to each task: "
          f"{options.answers or 'as in each file'}.")  # fmt: skip


if __name__ == "__main__":
    main()
