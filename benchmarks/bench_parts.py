"""Time of a training step's parts, and what the fast decoder saves.

    python benchmarks/bench_parts.py [--steps 8] [--warm 8]

The same steps of 32 tasks × G = 4 with two agents on the embedded default, in one process: once
through the fast decoder (`comlrl/models/fast/decoder.py`), once through transformers' modules; with
LoRA agents in the machine's own precision and in float32, and with all weights trained. Medians
of seconds a step after ``--warm`` steps (in bfloat16 on a CPU each new shape is compiled at its
first use), and the share of the physical limit: the model operations of the step, two for each
weight and token passed,
at the rate that one large product of the same precision reaches on all cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from comlrl.config.algorithms import MAGRPOConfig
from comlrl.loggers.tables import table
from comlrl.loop.interrupts import Signals
from comlrl.loop.resume import prepare
from comlrl.trainers.launch.commands import command_line
from comlrl.trainers.launch.wiring import allocator as memory
from comlrl.trainers.launch.wiring import assembly, machine, task_splits
from comlrl.trainers.magrpo import MAGRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "LoRA": [],
    "LoRA, float32": ["agent_model.torch_dtype=float32"],
    "all weights": ["lora.enabled=false", "magrpo.learning_rate=3e-4"],
}


class Recorder:
    """A logger that keeps each step's metrics and trees."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any]] = []

    def begin(self, mark: Any) -> None: ...

    def log(self, record: Any) -> None: ...

    def episodes(self, record: Any, trees: Any) -> None:
        self.steps.append((record.metrics, trees))

    def close(self) -> None: ...


def start(overrides: list[str], fast: bool, folder: str, steps: int) -> tuple[Any, MAGRPOTrainer]:
    """Return an assembled run of this many steps, and its trainer."""
    keys = [
        f"output.dir={folder}/run", "magrpo.num_generations=4", "magrpo.batch_size=32",
        "magrpo.eval_interval=0", "magrpo.kl_coef=0", "magrpo.num_train_epochs=null",
        "magrpo.top_p=null",
        f"magrpo.max_steps={steps}",
    ]  # fmt: skip
    file = str(ROOT / "configs/magrpo_quickstart.yaml")
    arguments = command_line.parse_arguments(
        "magrpo", ["--config", file, "--override", *keys, *overrides]
    )
    config, work, _ = command_line.resolve("magrpo", arguments)
    machine.deterministic()
    memory.keep_freed()
    train, _ = task_splits.load_both_splits(config.dataset, config.section, work.domain)
    begun = prepare(config, False, False)
    run = assembly.assemble(begun, work, Signals(), train, [], ExitStack())
    if not fast:
        for agent in run.team.agents:
            agent.fast = None
    section = cast("MAGRPOConfig", run.section)
    return run, MAGRPOTrainer(section, run.team, run.rollout, run.loop, run.sampling)


def measure(overrides: list[str], fast: bool, steps: int, warm: int) -> dict[str, float]:
    """Return median seconds of a step's parts, and the tokens that it passes through the model."""
    with tempfile.TemporaryDirectory() as folder:
        run, trainer = start(overrides, fast, folder, warm + steps)
        waited: list[float] = []  # for the reward, in each step
        score = run.reward.score

        def timed(actions: Any) -> Any:
            began = time.perf_counter()
            scores = score(actions)
            waited.append(time.perf_counter() - began)
            return scores

        run.reward.score = timed
        recorder = run.loop.log.logger = Recorder()
        trainer.train()
        run.reward.close()
    times: dict[str, list[float]] = {}
    for (metrics, trees), reward in list(zip(recorder.steps, waited, strict=True))[warm:]:
        step = metrics["step_seconds"]
        rollout = step * metrics["time/rollout_share"]
        parts = {
            "generation": rollout - reward, "reward": reward, "update": step - rollout,
            "step": step, "passed": passed(trees, 3 if run.team.agents[0].peft else 4),
        }  # fmt: skip
        for name, value in parts.items():
            times.setdefault(name, []).append(value)
    model = run.team.agents[0].model
    inner = [p for n, p in model.named_parameters() if "lora_" not in n and "embed" not in n]
    medians = {name: statistics.median(values) for name, values in times.items()}
    operations = 2 * medians["passed"] * sum(p.numel() for p in inner)
    return medians | {"limit": operations / product_rate(model.dtype)}


def passed(trees: Any, passes: int) -> float:
    """Return the tokens passed through the model.

    They are counted in generation, forward in the update, and backward (for full models twice: to
    activations and to weights).
    """
    turns = [turn for tree in trees for node in tree.nodes for turn in node.agents_N]
    tokens = sum(len(t.prompt_ids) + sum(len(c.token_ids) for c in t.completions_G) for t in turns)
    return float(passes * tokens)


def product_rate(dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product on all cores."""
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    a @ b
    began = time.perf_counter()
    for _ in range(5):
        a @ b
    return 5 * 2 * 2048**3 / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=8)
    options = parser.parse_args()
    rows = []
    for name, overrides in CASES.items():
        for way, fast in (("fast", True), ("modules", False)):
            medians = measure(overrides, fast, options.steps, options.warm)
            parts = [f"{medians[p]:.2f}" for p in ("generation", "reward", "update", "step")]
            share = f"{100 * medians['limit'] / medians['step']:.0f} %"
            rows.append([name, way, *parts, f"{128 / medians['step']:.0f}", share])
            print(rows[-1], file=sys.stderr, flush=True)
    head = ["agents", "through", "generation, s", "reward, s", "update, s", "step, s"]
    print(table([*head, "joint actions/s", "of the limit"], rows))


if __name__ == "__main__":
    main()
