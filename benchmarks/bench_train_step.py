"""Whole training steps against the peer (comlrl 1.4.3) and TRL's GRPO trainer: same work, one run.

    python benchmarks/bench_train_step.py [--rounds 2] [--tasks 192] [--device cpu]
    python benchmarks/bench_train_step.py --rounds 0 --learning [--patience 8]

Every number comes from its own process; contenders alternate, and a table gives medians with
the span over rounds; ratios are of rates of one round. "Same work" is: the same start weights,
tasks (each once), G, prompts, temperature 1 and at most 64 new tokens; one optimizer update for 32
tasks, no KL. The learning rate is 1e-5 for all: every update is computed and no policy moves, so
that all keep writing completions of one mean length, which the table shows. What is compared is
sampled tokens a second over whole steps, the first of each run, with its one-time costs, left out.
Our seconds of a step leave out writing its logs (0.02 to 0.06 s with 135M parameters).
Each is run in float32 and in bfloat16: the peer's weights (and nothing more exact beside them),
TRL's autocast, our weights, with masters in float32 where they are trained (``torch_dtype: auto``
takes what the machine is faster in). The peer runs in ``.venv-peer`` (made here if missing) with
its published kind of reward, in-process; ours scores in its sandbox.
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
LEARNING_RATE = 1e-5  # policies that stay as they are
MODEL = ROOT / "comlrl" / "builtin" / "tiny_coder"


def measured(seconds: float, tokens: float, completions: int, agents: int, memory: float) -> dict:
    return {
        "tokens": tokens / seconds,
        "joint": completions / agents / seconds,
        "length": tokens / completions,
        "memory": memory,
    }


def trained(
    tasks: int, batch: int, steps: int, *overrides: str, algorithm: str = "magrpo"
) -> tuple[list[dict], float]:
    """Run the train script; return metrics of all steps but the first, and peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        keys = {
            "num_generations": GENERATIONS,
            "batch_size": batch,
            "max_new_tokens": NEW_TOKENS,
            "max_steps": steps,
            "eval_interval": 0,
            "kl_coef": 0,
            "top_p": "null",  # the others do not truncate
            "learning_rate": LEARNING_RATE,
        }
        command = [
            sys.executable, f"train_{algorithm}.py", "--config",
            f"configs/{algorithm}_quickstart.yaml", "--override", f"output.dir={run}",
            f"dataset.train_split=train[:{tasks}]", "output.save_final_model=false",
            *(f"{algorithm}.{k}={v}" for k, v in keys.items()),
            *overrides,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines if line["phase"] == "train"][1:]
    return metrics, summary["train"]["peak_memory_mb"]


def ours(arguments: argparse.Namespace, *overrides: str, algorithm: str = "magrpo") -> dict:
    agents = 1 if algorithm == "grpo" else 2
    steps, memory = trained(
        arguments.tasks, BATCH, arguments.tasks // BATCH, *overrides, algorithm=algorithm
    )
    seconds = sum(step["step_seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    return measured(seconds, tokens, len(steps) * BATCH * GENERATIONS * agents, agents, memory)


def peer_job(arguments: argparse.Namespace, tasks: int, dtype: str | None = None) -> dict:
    """Return the description that ``peer_runner.py`` reads."""
    sys.path.insert(0, str(ROOT))
    from comlrl.processes.cores import available_cores
    from comlrl.rewards.code.domain import CODE
    from comlrl.tasks.prompts import Prompts

    lines = (ROOT / "comlrl/builtin/coopmini/train.jsonl").read_text().splitlines()[:tasks]
    rows = [json.loads(line) for line in lines]
    return {
        "seed": 0,
        "threads": available_cores(),
        "learning_rate": LEARNING_RATE,
        "num_generations": GENERATIONS,
        "max_new_tokens": NEW_TOKENS,
        "batch_size": BATCH,
        "dtype": dtype or ("float32" if arguments.device == "cpu" else "bfloat16"),
        "model": str(MODEL),
        "tasks": [
            {
                "prompts": list(Prompts(CODE).first(CODE.task("", row), 2)),
                "test": row["test"],
                "entry_point": row["entry_point"],
            }
            for row in rows
        ],
    }  # fmt: skip


def runner(python: Path | str, script: str, job: dict) -> dict:
    done = subprocess.run(
        [str(python), "-E", str(ROOT / "benchmarks" / script)],  # our PYTHONPATH is not theirs
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peer(arguments: argparse.Namespace, dtype: str) -> dict:
    job = peer_job(arguments, arguments.tasks, dtype)
    results = runner(PEER / "bin" / "python", "peer_runner.py", job)
    agents = len(job["tasks"][0]["prompts"])
    lengths = results["lengths"][BATCH * GENERATIONS * agents :]  # after the first update
    updated = [ended for what, _, ended in results["spans"] if what == "update"]
    seconds = updated[-1] - updated[agents - 1]
    return measured(seconds, sum(lengths), len(lengths), agents, results["peak_memory_mb"])


def trl(arguments: argparse.Namespace, bf16: bool) -> dict:
    """Measure TRL's GRPO trainer on main's prompts; ``bf16``: with autocast, its default."""
    job = peer_job(arguments, arguments.tasks, "float32") | {"bf16": bf16}
    results = runner(sys.executable, "trl_runner.py", job)
    lengths, times = results["lengths"][BATCH * GENERATIONS :], results["step_times"]
    seconds = times[-1] - times[0]
    return measured(seconds, sum(lengths), len(lengths), 1, results["peak_memory_mb"])


def hide_gpus(device: str) -> None:
    """With ``cpu``, hide all GPUs from this process and from those that it starts."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def make_peer() -> None:
    """Install the peer, unless it was installed before; an interrupted installation continues."""
    ready = PEER / ".ready"
    if ready.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
    pip = [str(PEER / "bin" / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch", "comlrl==1.4.3"], check=True)
    ready.touch()


def seconds_to(rewards: list[float], times: list[float], level: float, window: int) -> float | None:
    """Return when the mean of the last ``window`` rewards first reached the level."""
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
             f"magrpo.num_generations={GENERATIONS}", f"magrpo.batch_size={BATCH}",
             "magrpo.top_p=null"],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    elapsed, ours_at = 0.0, None
    for line in lines:
        metrics = line["metrics"]
        elapsed += metrics["step_seconds"]
        if ours_at is None and metrics["reward_mean"] >= level:
            ours_at = elapsed
    if ours_at is None:
        raise SystemExit(f"ours came to no mean reward of {level} in {elapsed:.0f} s")
    job = peer_job(arguments, 384) | {"learning_rate": 3e-4, "epochs": 10}
    job["seconds"] = arguments.patience * ours_at
    results = runner(PEER / "bin" / "python", "peer_runner.py", job)
    peer_at = seconds_to(results["rewards"], results["times"], level, window)
    theirs = f"{peer_at:.0f}" if peer_at is not None else f"more than {results['seconds']:.0f}"
    ratio = (peer_at or results["seconds"]) / ours_at
    best = max(
        statistics.fmean(results["rewards"][end - window : end])
        for end in range(window, len(results["rewards"]) + 1)
    )
    print(
        f"\nseconds to a mean reward of {level}: ours {ours_at:.0f}, peer {theirs} (at most "
        f"{best:.2f}), ratio {'' if peer_at is not None else 'above '}{ratio:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=192, help="a multiple of 32, at least 64")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--patience", type=float, default=8)
    arguments = parser.parse_args()
    hide_gpus(arguments.device)
    make_peer()
    if arguments.rounds:
        rates(arguments)
    if arguments.learning:
        learning(arguments)


def rates(arguments: argparse.Namespace) -> None:
    """Print a table: each contender's tokens per second, and the counts behind them."""
    single, half = "agent_model.torch_dtype=float32", "agent_model.torch_dtype=bfloat16"
    full = "lora.enabled=false"
    contenders: dict[str, Callable[[], dict]] = {
        "peer, 2 agents, float32": lambda: peer(arguments, "float32"),
        "peer, 2 agents, bfloat16": lambda: peer(arguments, "bfloat16"),
        "ours, 2 agents, all weights, float32": lambda: ours(arguments, full, single),
        "ours, 2 agents, all weights, bfloat16": lambda: ours(arguments, full, half),
        "ours, 2 agents, LoRA, float32": lambda: ours(arguments, single),
        "ours, 2 agents, LoRA, bfloat16": lambda: ours(arguments, half),
        "TRL GRPO, 1 agent, float32": lambda: trl(arguments, False),
        "TRL GRPO, 1 agent, bfloat16": lambda: trl(arguments, True),
        "ours GRPO, 1 agent, all weights, float32": lambda: ours(
            arguments, full, single, algorithm="grpo"
        ),
        "ours GRPO, 1 agent, all weights, bfloat16": lambda: ours(
            arguments, full, half, algorithm="grpo"
        ),
        "ours GRPO, 1 agent, LoRA, bfloat16": lambda: ours(arguments, half, algorithm="grpo"),
    }
    measurements: dict[str, list[dict]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, contender in contenders.items():
            started = time.monotonic()
            measurements[name].append(contender())
            seconds = time.monotonic() - started
            print(
                f"{name}: {measurements[name][-1]['tokens']:.0f}/s ({seconds:.0f} s)",
                file=sys.stderr,
            )
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in measurements.items()
    }
    ratios = ratios_of(
        {name: [run["tokens"] for run in runs] for name, runs in measurements.items()}
    )
    print(
        "| contender | tokens/s (span) | to the other's faster form, in a round (span) | "
        "tokens a completion | joint actions/s | peak memory, MB |\n|---|---|---|---|---|---|"
    )
    for name, median in medians.items():
        span = sorted(run["tokens"] for run in measurements[name])
        times = sorted(ratios[name])
        print(
            f"| {name} | {median['tokens']:.0f} ({span[0]:.0f}–{span[-1]:.0f}) | "
            f"{statistics.median(times):.1f}× ({times[0]:.1f}–{times[-1]:.1f}) | "
            f"{median['length']:.1f} | {median['joint']:.1f} | {median['memory']:.0f} |"
        )


def ratios_of(rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return each contender's rate in each round, divided by the other project's in that round.

    Of the other project's two contenders, the one with the higher median counts: machines drift
    more between rounds than within one.
    """
    others = {"2 agents": "peer, ", "1 agent": "TRL GRPO, "}
    ratios = {}
    for name, rate_R in rates.items():
        agents = name.split(", ")[1]
        two = [runs for each, runs in rates.items() if each.startswith(others[agents] + agents)]
        other = max(two, key=statistics.median)
        ratios[name] = [mine / theirs for mine, theirs in zip(rate_R, other, strict=True)]
    return ratios


if __name__ == "__main__":
    main()
