"""Whole training steps against the peer (comlrl 1.4.3) and TRL's GRPO trainer: same work, one run.

    python benchmarks/bench_train_step.py [--rounds 2] [--tasks 64] [--device cpu]
    python benchmarks/bench_train_step.py --rounds 0 --learning [--patience 8]

Every number comes from a process of its own; contenders alternate, and a table gives medians with
the span over rounds. "Same work" is: the same start weights, tasks, G, prompts, temperature 1 and
at most 64 new tokens; one optimizer update for 32 tasks, no KL. The first update of each run, with
its one-time costs, is left out of every rate. The peer runs in ``.venv-peer`` (made
here if missing) with its published kind of reward, in-process; ours scores in its sandbox.
``--learning`` measures the time to a mean training reward of 3.0; the peer is given up after
``--patience`` times our time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".venv-peer"
BATCH, GENERATIONS, NEW_TOKENS = 32, 4, 64
MODEL = ROOT / "comlrl" / "builtin" / "tiny_coder"


def ours(arguments: argparse.Namespace, *overrides: str, algorithm: str = "magrpo") -> dict:
    """A run of the train script; joint actions a second and the shares of its time."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        keys = {
            "num_generations": GENERATIONS,
            "batch_size": BATCH,
            "max_new_tokens": NEW_TOKENS,
            "max_steps": 2 * arguments.tasks // BATCH,
            "eval_interval": 0,
            "kl_coef": 0,
        }
        command = [
            sys.executable, f"train_{algorithm}.py", "--config",
            f"configs/{algorithm}_quickstart.yaml", "--override", f"output.dir={run}",
            "output.save_final_model=false", *(f"{algorithm}.{k}={v}" for k, v in keys.items()),
            *overrides,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["phase"] == "train"][1:]
    size = BATCH * GENERATIONS
    return {
        "rate": size * len(steps) / sum(size / s["joint_actions_per_second"] for s in steps),
        "memory": summary["train"]["peak_memory_mb"],
        "update": statistics.median(step["time/update_share"] for step in steps),
    }


def peer_job(arguments: argparse.Namespace, tasks: int) -> dict:
    """The description that ``peer_runner.py`` reads."""
    sys.path.insert(0, str(ROOT))
    from comlrl.prompts import first_prompts
    from comlrl.types import Task

    lines = (ROOT / "comlrl/builtin/coopmini/train.jsonl").read_text().splitlines()[:tasks]
    rows = [json.loads(line) for line in lines]
    problems = [Task("", row["prompt"], row["test"], row["entry_point"]) for row in rows]
    return {
        "seed": 0,
        "threads": os.cpu_count(),
        "learning_rate": 3e-4,
        "num_generations": GENERATIONS,
        "max_new_tokens": NEW_TOKENS,
        "batch_size": BATCH,
        "dtype": "float32" if arguments.device == "cpu" else "bfloat16",
        "model": str(MODEL),
        "tasks": [
            {
                "prompts": list(first_prompts(problem, 2)),
                "test": problem.test,
                "entry_point": problem.entry_point,
            }
            for problem in problems
        ],
    }  # fmt: skip


def runner(python: Path | str, script: str, job: dict) -> dict:
    done = subprocess.run(
        [str(python), str(ROOT / "benchmarks" / script)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peer(arguments: argparse.Namespace) -> dict:
    job = peer_job(arguments, arguments.tasks)
    said = runner(PEER / "bin" / "python", "peer_runner.py", job)
    first = BATCH * GENERATIONS  # joint actions of the first update
    seconds = said["seconds"] - said["times"][first - 1]
    return {
        "rate": (len(said["rewards"]) - first) / seconds,
        "memory": said["peak_memory_mb"],
    }


def trl(arguments: argparse.Namespace) -> dict:
    """Completions a second of TRL's GRPO trainer on main's prompts alone."""
    job = peer_job(arguments, arguments.tasks)
    said = runner(sys.executable, "trl_runner.py", job)
    steps = said["step_times"]
    rate = BATCH * GENERATIONS * (len(steps) - 1) / (steps[-1] - steps[0])
    return {"rate": rate, "memory": said["peak_memory_mb"]}


def make_peer() -> None:
    if (PEER / "bin" / "python").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
    pip = [str(PEER / "bin" / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch", "comlrl==1.4.3"], check=True)


def seconds_to(rewards: list[float], times: list[float], level: float, window: int) -> float | None:
    """When the mean of the last ``window`` rewards first reached the level."""
    for end in range(window, len(rewards) + 1):
        if statistics.fmean(rewards[end - window : end]) >= level:
            return times[end - 1]
    return None


def learning(arguments: argparse.Namespace, level: float = 3.0) -> None:
    """Time to a mean joint reward of 3.0 over a step's joint actions, from the same start."""
    window = BATCH * GENERATIONS
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "train_magrpo.py", "--config", "configs/magrpo_quickstart.yaml",
             "--override", f"output.dir={run}", "magrpo.eval_interval=0", "magrpo.max_steps=40",
             f"magrpo.num_generations={GENERATIONS}", f"magrpo.batch_size={BATCH}"],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    elapsed, ours_at = 0.0, None
    for line in lines:
        metrics = line["metrics"]
        elapsed += window / metrics["joint_actions_per_second"]
        if ours_at is None and metrics["reward_mean"] >= level:
            ours_at = elapsed
    if ours_at is None:
        raise SystemExit(f"ours came to no mean reward of {level} in {elapsed:.0f} s")
    job = peer_job(arguments, 384) | {"epochs": 10, "seconds": arguments.patience * ours_at}
    said = runner(PEER / "bin" / "python", "peer_runner.py", job)
    peer_at = seconds_to(said["rewards"], said["times"], level, window)
    theirs = f"{peer_at:.0f}" if peer_at is not None else f"more than {said['seconds']:.0f}"
    ratio = (peer_at or said["seconds"]) / ours_at
    best = max(
        statistics.fmean(said["rewards"][end - window : end])
        for end in range(window, len(said["rewards"]) + 1)
    )
    print(
        f"\nseconds to a mean reward of {level}: ours {ours_at:.0f}, peer {theirs} (at most "
        f"{best:.2f}), ratio {'' if peer_at is not None else 'above '}{ratio:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--patience", type=float, default=8)
    arguments = parser.parse_args()
    make_peer()
    if arguments.rounds:
        rates(arguments)
    if arguments.learning:
        learning(arguments)


def rates(arguments: argparse.Namespace) -> None:
    """Prints each contender's joint actions a second."""
    contenders: dict[str, Callable[[], dict]] = {
        "peer, 2 agents, all weights": lambda: peer(arguments),
        "ours, 2 agents, all weights": lambda: ours(
            arguments, "lora.enabled=false", "magrpo.learning_rate=3e-4"
        ),
        "ours, 2 agents, LoRA (default)": lambda: ours(arguments),
        "TRL GRPO, 1 agent": lambda: trl(arguments),
        "ours GRPO, 1 agent, all weights": lambda: ours(
            arguments, "lora.enabled=false", "grpo.learning_rate=3e-4", algorithm="grpo"
        ),
        "ours GRPO, 1 agent, LoRA": lambda: ours(arguments, algorithm="grpo"),
    }
    found: dict[str, list[dict]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, contender in contenders.items():
            started = time.monotonic()
            found[name].append(contender())
            rate = found[name][-1]["rate"]
            print(f"{name}: {rate:.1f}/s ({time.monotonic() - started:.0f} s)", file=sys.stderr)
    base = {
        name: "TRL GRPO, 1 agent" if "1 agent" in name else "peer, 2 agents, all weights"
        for name in contenders
    }
    medians = {n: statistics.median(r["rate"] for r in runs) for n, runs in found.items()}
    print("| contender | joint actions/s (span) | ratio | peak memory, MB |\n|---|---|---|---|")
    for name, runs in found.items():
        rates = [run["rate"] for run in runs]
        memory = statistics.median(run["memory"] for run in runs)
        print(
            f"| {name} | {medians[name]:.1f} ({min(rates):.1f}–{max(rates):.1f}) | "
            f"{medians[name] / medians[base[name]]:.1f}× | {memory:.0f} |"
        )


if __name__ == "__main__":
    main()
