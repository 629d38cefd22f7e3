"""The quickstarts of all algorithms over several seeds: held-out reward before and after.

    python benchmarks/results_table.py [--seeds 1 2 3] [--only magrpo ppo] [--override a.b=c]

Each run is a whole `python train_X.py --config configs/X_quickstart.yaml` with its seed, one at a
time, timed from outside. Rewards are the means over the 64 held-out tasks in the runs' own
`summary.json`. The table goes to standard output; `docs/results.md` holds one. Finished runs under
--out are read, not repeated; a new measurement needs a new folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from loggers.tables import table

ROOT = Path(__file__).resolve().parents[1]
QUICKSTARTS = {
    "magrpo": "magrpo", "mt_magrpo": "magrpo", "grpo": "grpo", "ppo": "ppo", "ippo": "ppo",
    "mappo": "ppo", "shppo": "shppo", "madpo": "madpo", "marlhf": "marlhf",
}  # fmt: skip


def run(name: str, seed: int, out: Path, overrides: Sequence[str]) -> dict[str, float]:
    """The held-out rewards before and after, and the seconds of the whole command."""
    folder = out / f"{name}_{seed}"
    if not (folder / "seconds").exists():
        started = time.monotonic()
        subprocess.run(
            [
                sys.executable, f"train_{QUICKSTARTS[name]}.py",
                "--config", f"configs/{name}_quickstart.yaml",
                "--override", f"seed={seed}", f"output.dir={folder}", *overrides,
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (folder / "seconds").write_text(str(time.monotonic() - started))
    summary = json.loads((folder / "summary.json").read_text())
    seconds = float((folder / "seconds").read_text())
    said = {at: summary[f"eval_{at}"]["reward_mean"] for at in ("start", "end")}
    for turn in (1, 2):
        if (reward := summary["eval_end"].get(f"turn_{turn}/reward_mean")) is not None:
            said[f"end of turn {turn}"] = reward
    return said | {"seconds": seconds}


def row(name: str, runs: list[dict[str, float]]) -> list[object]:
    gains = [run["end"] - run["start"] for run in runs]
    each = ", ".join(f"{run['start']:.2f} → {run['end']:.2f}" for run in runs)
    longest = max(run["seconds"] for run in runs)
    return [f"`{name}_quickstart.yaml`", each, f"{statistics.fmean(gains):+.2f}",
            f"{min(gains):+.2f}", f"{longest:.0f} s"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=list(QUICKSTARTS), choices=list(QUICKSTARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "results")
    parser.add_argument(
        "--override", nargs="+", default=[], help="of every run; give it an --out of its own"
    )
    options = parser.parse_args()
    found = {}
    for name in options.only:
        found[name] = [
            run(name, seed, options.out.resolve(), options.override) for seed in options.seeds
        ]
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    head = ["quickstart", "start → end of each seed", "mean gain", "least", "longest run"]
    print(table(head, [row(name, runs) for name, runs in found.items()]))
    print(f"\nSeeds: {', '.join(map(str, options.seeds))}; 64 tasks, each file's eval_answers.")


if __name__ == "__main__":
    main()
