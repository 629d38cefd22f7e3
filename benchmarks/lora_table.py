"""LoRA of several ranks against all weights: MAGRPO on the embedded default.

    python benchmarks/lora_table.py [--seeds 1 2 3] [--env-steps 2944] [--only r4 all]

Each form of training scores --env-steps joint actions (the quickstart: 8,960), the learning rate
falling to 0 with them, at three rates on the first seed, and at the best of them on the others.
Rewards are of the 64 held-out tasks, four answers each. Seconds are the command's own (CPU time,
evaluations included) and memory its peak, both of one process. A Markdown table goes to standard
output. Runs are kept under --out: finished ones are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.run_files import SUMMARY
from loggers.tables import table

ROOT = Path(__file__).resolve().parents[1]
LORA_RATES, FULL_RATES = (1e-3, 3e-3, 1e-2), (1e-4, 3e-4, 1e-3)
FORMS: dict[str, tuple[str, dict[str, object], tuple[float, ...]]] = {  # title, overrides, rates
    "r4": ("LoRA, r = 4", {"lora.r": 4}, LORA_RATES),
    "r16": ("LoRA, r = 16", {"lora.r": 16}, LORA_RATES),
    "r64": ("LoRA, r = 64", {"lora.r": 64}, LORA_RATES),
    "all": ("all weights", {"lora.enabled": False}, FULL_RATES),
}


def run(form: str, rate: float, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """A finished run's rewards, seconds and memory. Raises CalledProcessError where it fails."""
    folder = options.out.resolve() / f"{form}_{rate:g}_{seed}"
    overrides = FORMS[form][1] | {
        "seed": seed, "output.dir": str(folder), "output.save_final_model": False,
        "magrpo.learning_rate": rate, "magrpo.max_steps": None,
        "magrpo.max_env_steps": options.env_steps, "magrpo.eval_interval": 1000,
        "magrpo.eval_answers": 4, "magrpo.top_p": None,
    }  # fmt: skip
    if not (folder / "seconds").exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                sys.executable, "train_magrpo.py", "--config", "configs/magrpo_quickstart.yaml",
                "--override", *(f"{key}={json.dumps(value)}" for key, value in overrides.items()),
            ],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
        (folder / "seconds").write_text(str(own))
    summary = json.loads((folder / SUMMARY).read_text())
    assert summary["env_steps"] >= options.env_steps, f"{folder} is of another --env-steps"
    return {
        "start": summary["eval_start"]["reward_mean"],
        "end": summary["eval_end"]["reward_mean"],
        "seconds": float((folder / "seconds").read_text()),
        "memory": summary["train"]["peak_memory_mb"],
    }


def row(form: str, tried: dict[float, float], runs: Sequence[dict[str, float]]) -> list[object]:
    best = max(tried, key=lambda rate: tried[rate])
    ends = [own["end"] for own in runs]
    spread = f" ± {statistics.stdev(ends):.2f}" if len(ends) > 1 else ""
    return [
        FORMS[form][0],
        ", ".join(f"{rate:g}: {end:.2f}" for rate, end in tried.items()),
        f"{best:g}",
        ", ".join(f"{own['start']:.2f} → {own['end']:.2f}" for own in runs),
        f"{statistics.fmean(ends):.2f}{spread}",
        f"{statistics.fmean(own['seconds'] for own in runs):.0f} s",
        f"{max(own['memory'] for own in runs):.0f} MB",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--env-steps", type=int, default=2944, help="scored joint actions of a run")
    parser.add_argument("--only", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "lora")
    options = parser.parse_args()
    first, *others = options.seeds
    rows = []
    for form in options.only:
        tried = {rate: run(form, rate, first, options) for rate in FORMS[form][2]}
        best = max(tried, key=lambda rate: tried[rate]["end"])
        runs = [tried[best], *(run(form, best, seed, options) for seed in others)]
        ends = {rate: own["end"] for rate, own in tried.items()}
        rows.append(row(form, ends, runs))
        print(form, json.dumps(rows[-1]), file=sys.stderr, flush=True)
    head = [
        "trained", f"rates on seed {first}", "best", "start → end of each seed", "end", "seconds",
        "memory",
    ]  # fmt: skip
    print(table(head, rows))
    print(f"\nSeeds: {', '.join(map(str, options.seeds))}; {options.env_steps:,} joint actions.")


if __name__ == "__main__":
    main()
