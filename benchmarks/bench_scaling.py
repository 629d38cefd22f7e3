"""Cost against G, N, T and tasks: seconds of a training step against the tokens it generates.

    python benchmarks/bench_scaling.py [--steps 3] [--out outputs/scaling_cost.png]

Each point is a run of the train script on the embedded default; the first step (warm-up) is left
out and the median of the others taken. A cost linear in generated tokens is a straight line; the
table gives each axis' exponent, the slope of log(seconds) against log(tokens): 1 is linear, 2
quadratic, and below 1 means that a fixed cost is still being spread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = {"num_generations": 4, "num_agents": 2, "num_turns": 1, "batch_size": 8}
AXES: dict[str, list[dict[str, int | str]]] = {
    "generations G": [{"num_generations": g} for g in (2, 4, 8, 16)],
    "agents N": [{"num_agents": n} for n in (1, 2, 3, 4)],
    "turns T (handoff)": [{"num_turns": t, "handoff": "random"} for t in (1, 2, 3)],
    "tasks B": [{"batch_size": b} for b in (4, 8, 16, 32)],
}


def point(changes: dict, steps: int) -> tuple[float, float]:
    """Return (tokens generated, seconds) of a median training step."""
    keys = BASE | {"max_steps": steps + 1, "eval_interval": 0} | changes
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "train_magrpo.py", "--config", "configs/magrpo_quickstart.yaml",
            "--override", f"output.dir={run}", "output.save_final_model=false",
            *(f"magrpo.{key}={value}" for key, value in keys.items()),
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines][1:]
    tokens = statistics.median(m["tokens"] for m in metrics)
    return tokens, statistics.median(m["step_seconds"] for m in metrics)


def exponent(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope of log(seconds) against log(tokens)."""
    x = [math.log(tokens) for tokens, _ in points]
    y = [math.log(seconds) for _, seconds in points]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum(
        (a - mx) ** 2 for a in x
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "scaling_cost.png")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    print("| axis | tokens a step → seconds | exponent |\n|---|---|---|")
    for name, settings in AXES.items():
        points = [point(changes, arguments.steps) for changes in settings]
        shown = ", ".join(f"{tokens:.0f} → {seconds:.2f}" for tokens, seconds in points)
        print(f"| {name} | {shown} | {exponent(points):.2f} |", flush=True)
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set(xlabel="generated tokens in a training step", ylabel="seconds of the step")
    axes.legend()
    figure.tight_layout()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=120)
    print(f"\nplot: {arguments.out}")


if __name__ == "__main__":
    main()
