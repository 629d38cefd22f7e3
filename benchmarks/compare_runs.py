"""Runs and baselines beside each other: which differences are larger than the noise, at what cost.

    python benchmarks/compare_runs.py outputs/magrpo_coopmini_1 outputs/grpo_coopmini_1 \\
        baseline:single baseline:discussion [--keys 1 2 3] [--samples 4]

Each is evaluated by `evaluate.py` once for each of --keys (`seed=…`: other random numbers for the
same tasks), with --samples answers to each task. s is the standard deviation of one evaluation's
mean reward between keys, pooled over all that is compared. A difference of two means over n keys
is larger than the noise where it exceeds two of its standard errors, 2 s √(2/n): the noise floor.
It is that of sampling alone, not of other training seeds or other tasks.

pass@k at equal FLOPs: k answers to each task that cost at least what one of the dearest does, of
which one must pass. Tables go to standard output; evaluations are written to --out and read again.
Baselines of another --config need another --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.stored_results import check_settings
from comlrl.loggers.tables import table

ROOT = Path(__file__).resolve().parents[1]


def evaluated(what: str, key: int, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a run or a ``baseline:NAME``. Raises CalledProcessError if it fails."""
    kind, _, name = what.rpartition(":")
    place = Path(name)
    label = name if kind else f"{place.resolve().parent.name}_{place.name}"
    file = options.out.resolve() / f"{label}_{key}_{options.samples}.json"
    if not file.exists():
        team = ["--config", options.config, "--baseline", name] if kind else ["--checkpoint", name]
        ks = ",".join(str(k) for k in range(1, options.samples + 1))
        subprocess.run(
            [
                sys.executable, str(ROOT / "evaluate.py"), *team, "--k", ks, "--out", str(file),
                "--override", f"seed={key}",
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return json.loads(file.read_text())


def noise(rewards: Sequence[Sequence[float]]) -> float:
    """Return s: the standard deviation between keys, pooled over the compared results."""
    return math.sqrt(statistics.fmean(map(statistics.variance, rewards)))


def mean(runs: Sequence[Mapping[str, Any]], section: str, key: str) -> float:
    """Return the mean over the keys."""
    return statistics.fmean(run[section][key] for run in runs)


def row(name: str, runs: Sequence[Mapping[str, Any]], budget: float) -> list[object]:
    """Return a table row. ``budget``: FLOPs of an answer of the most expensive contender."""
    flops, samples = mean(runs, "budget", "flops_per_answer"), runs[0]["samples"]
    k = math.ceil(budget / flops - 0.05)  # costs that differ by less count as equal
    equal = f"{mean(runs, 'metrics', f'pass@{k}'):.2f} (k = {k})" if k <= samples else f"k = {k}"
    each = ", ".join(f"{run['metrics']['reward_mean']:.2f}" for run in runs)
    return [
        name, each, f"{mean(runs, 'metrics', 'reward_mean'):.2f}",
        f"{mean(runs, 'metrics', 'pass@1'):.2f}",
        equal, f"{mean(runs, 'budget', 'tokens_per_answer'):.0f}", f"{flops / 1e6:.0f}M",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", help="folders of runs, or baseline:NAME")
    parser.add_argument("--config", default="magrpo_quickstart", help="of the baselines")
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--samples", type=int, default=4, help="answers to each task")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "compared_runs")
    options = parser.parse_args()
    if len(options.keys) < 2:
        parser.error("--keys: noise is what differs between keys; give two or more")
    check_settings(options.out, {"config": options.config})
    evaluations = {w: [evaluated(w, key, options) for key in options.keys] for w in options.what}
    rewards = {
        w: [run["metrics"]["reward_mean"] for run in runs] for w, runs in evaluations.items()
    }
    budget = max(mean(runs, "budget", "flops_per_answer") for runs in evaluations.values())
    head = [
        "", "mean reward with each key", "mean", "pass@1", "pass@k at equal FLOPs",
        "tokens an answer", "FLOPs an answer",
    ]  # fmt: skip
    print(table(head, [row(w, runs, budget) for w, runs in evaluations.items()]))
    s = noise(list(rewards.values()))
    floor = 2 * s * math.sqrt(2 / len(options.keys))
    print(f"s = {s:.3f}; noise floor of a difference of means over {len(options.keys)} keys: "
          f"{floor:.3f}\n")  # fmt: skip
    means = {w: statistics.fmean(by_key) for w, by_key in rewards.items()}
    rows = [
        [f"{b} − {a}", f"{means[b] - means[a]:+.3f}",
         "yes" if abs(means[b] - means[a]) > floor else "no"]
        for a, b in itertools.combinations(evaluations, 2)
    ]  # fmt: skip
    print(table(["difference", "mean reward", "larger than the noise"], rows))


if __name__ == "__main__":
    main()
