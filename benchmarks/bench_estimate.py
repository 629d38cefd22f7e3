"""The estimate of ``--dry-run --hardware cpu`` against what a run takes, on this machine.

    python benchmarks/bench_estimate.py [--steps 20] [--warm 5]

Seconds of a training step of the quickstart, and of a random Qwen2 of 12 layers, width 640 and
Qwen's vocabulary of 151,936 (168M parameters) with steps of 2 tasks × G = 4 and 64 tokens. The
machine's peaks are measured before each run, while nothing else runs. A run's numbers are medians
and spans of the steps after the first ``--warm``; "as asked" is estimated from the configuration
alone, in which completions are as long as they may be, "at its length" with their mean length in
the run. The large model takes three steps, of which the first is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_real_shape import make_endless
from bench_train_step import ROOT, trained

from comlrl.config.resolved import Config
from loggers.tables import table
from trainers.launch.commands import command_line
from trainers.launch.cost import roofline
from trainers.launch.wiring.sampling_settings import limits

QUICKSTART = str(ROOT / "configs" / "magrpo_quickstart.yaml")


def resolved(keys: list[str]) -> tuple[Config, tuple[int, ...]]:
    """The quickstart's configuration with these overrides, and each agent's max_new_tokens."""
    parsed = command_line.parse_arguments("magrpo", ["--config", QUICKSTART, "--override", *keys])
    config, work, _ = command_line.resolve("magrpo", parsed)
    return config, limits(config, work.roles)


def estimated(keys: list[str], length: float = 0) -> dict[str, float]:
    """Seconds of a step's parts; ``length``: of a completion, 0 for the longest."""
    config, limits_N = resolved(keys)
    on = replace(roofline.hardware("cpu", config), tokens=length)
    step = roofline.step_cost(config, limits_N, on)
    rollout, update = step.generation() + step.reward(), step.update()
    return {"rollout": rollout, "update": update, "step": rollout + update}


def compare(name: str, steps: int, warm: int, keys: list[str]) -> list[list[str]]:
    """A row for each part of a step, of ``steps`` measured ones."""
    asked = estimated(keys)
    run, _ = trained(384, 16, warm + steps, *keys)
    run = run[warm - 1 :]  # the first is left out already
    length = statistics.fmean(step["completion_length_mean"] for step in run)
    at_length = estimated(keys, length)
    took = {"rollout": [], "update": [], "step": [step["step_seconds"] for step in run]}
    for step in run:
        rollout = step["step_seconds"] * step["time/rollout_share"]
        took["rollout"].append(rollout)
        took["update"].append(step["step_seconds"] - rollout)
    rows = []
    for part, seconds in took.items():
        median = statistics.median(seconds)
        rows.append(
            [name, f"{length:.0f}", part, f"{median:.2f} ({min(seconds):.2f}–{max(seconds):.2f})"]
            + [f"{e[part]:.2f} ({e[part] / median:.1f}×)" for e in (asked, at_length)]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="of the quickstart")
    parser.add_argument("--warm", type=int, default=5, help="that come before them")
    options = parser.parse_args()
    section = resolved([])[0].section
    own = ("num_generations", "batch_size", "max_new_tokens", "top_p", "kl_coef", "learning_rate")
    quickstart = [f"magrpo.{name}={getattr(section, name)}" for name in own]
    rows = compare("quickstart", options.steps, options.warm, quickstart)
    with tempfile.TemporaryDirectory() as folder:
        make_endless(Path(folder), 640, 12)
        large = [
            f"agent_model.name={folder}", "magrpo.num_generations=4", "magrpo.batch_size=2",
            "magrpo.max_new_tokens=64", "magrpo.top_p=null", "magrpo.kl_coef=0",
            "reward.target=benchmarks.noise_reward:Noise",
        ]  # fmt: skip
        rows += compare("168M, LoRA", 2, 1, large)
    heads = ["run", "tokens a completion", "part", "took, s", "as asked, s", "at its length, s"]
    print(table(heads, rows))


if __name__ == "__main__":
    main()
