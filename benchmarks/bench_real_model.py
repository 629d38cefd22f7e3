"""SmolLM2-135M-Instruct against the peer, TRL and transformers: generation, update, whole steps.

    make real-model
    python benchmarks/bench_real_model.py [--rounds 3] [--steps 2]

Nothing else should run. The model's end token is moved past the vocabulary, where no policy can
sample it, and its chat template is left out, so that all contenders read the same prompts and write
64 tokens to each. Three tables:

1. Generation of 32 rows (8 prompts of 200 tokens with 4 completions of 48 tokens each, two LoRA
   agents on one base in ours) against transformers' ``generate``, in turn.
2. The parts of a step of 4 tasks × G = 4 for two LoRA agents, and the update's share of the limit:
   two operations for each weight outside the embedding, token and pass (forward, and back to the
   activations), at the rate of one large product.
3. Whole steps of 4 tasks × G = 4 at a learning rate of 1e-5, the first of each run left out: two
   agents against the peer (comlrl 1.4.3, in ``.venv-peer``, which is made here if missing), and
   one agent against TRL's GRPO. Each number comes from its own process; contenders alternate.

All compute in this CPU's faster precision: bfloat16 where it has instructions for it (TRL by
autocast), else float32. Medians over rounds, with the span.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench_parts import measure
from bench_train_step import (
    GENERATIONS,
    PEER,
    hide_gpus,
    make_peer,
    peer_job,
    runner,
    trained,
)

from comlrl.loggers.tables import table
from comlrl.models.pretrained import multiplies_bfloat16_fast

TASKS, ROWS, PROMPT, NEW = 4, 32, 200, 48
FAST = multiplies_bfloat16_fast(torch.cpu.get_capabilities())
PRECISION = "bfloat16" if FAST else "float32"
NEVER = "<|never|>"
AGENTS = 2


def make_endless(model: Path, folder: Path) -> None:
    """Save a model folder with the same weights that cannot end a completion."""
    (folder / "model.safetensors").symlink_to((model / "model.safetensors").resolve())
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    last = next(t for t in tokenizer["added_tokens"] if t["content"] == settings["eos_token"])
    tokenizer["model"]["vocab"][NEVER] = config["vocab_size"]
    tokenizer["added_tokens"].append(last | {"id": config["vocab_size"], "content": NEVER})
    written = {
        "config.json": config | {"eos_token_id": None},
        "generation_config.json": {"bos_token_id": config["bos_token_id"]},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings | {"eos_token": NEVER},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))


def generation(folder: str, rounds: int) -> list[list[str]]:
    """Return table rows: tokens per second with and without top-p, and those of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from comlrl.models.pretrained import build_team
    from comlrl.trainers.launch.commands import command_line
    from comlrl.trainers.launch.wiring.assembly import build_sampler
    from comlrl.types import Request, Sampling

    arguments = ["--config", "configs/magrpo_quickstart.yaml"]
    arguments += [
        "--override",
        f"agent_model.name={folder}",
        f"agent_model.torch_dtype={PRECISION}",
    ]
    config, _, _ = command_line.resolve("magrpo", command_line.parse_arguments("magrpo", arguments))
    _, sampler = build_sampler(config, build_team(config, reference=False, device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tasks = peer_job(argparse.Namespace(device="cpu"), ROWS)["tasks"]
    text = tokenizer("\n".join(prompt for task in tasks for prompt in task["prompts"])).input_ids
    prompts = torch.tensor(text[: ROWS // 4 * PROMPT]).view(ROWS // 4, PROMPT)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=PRECISION)

    def sampled(top_p: float | None) -> None:
        requests = [
            Request(tuple(ids), tuple((row, g) for g in range(4)))
            for row, ids in enumerate(prompts.tolist())
        ]
        half = len(requests) // 2
        sampler.sample([requests[:half], requests[half:]], Sampling(1.0, NEW, top_p=top_p))

    def generated() -> None:
        plain.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
            temperature=1.0, max_new_tokens=NEW, num_return_sequences=4, pad_token_id=0,
        )  # fmt: skip

    contenders: dict[str, Callable[[], None]] = {
        "transformers' generate": generated,
        "ours": lambda: sampled(None),
        "ours, top_p 0.95": lambda: sampled(0.95),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):  # the first compiles products of new shapes
        for name, contender in contenders.items():
            began = time.monotonic()
            contender()
            times[name].append(time.monotonic() - began)
    base = statistics.median(times["transformers' generate"][1:])
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds[1:])
        span = f"{min(seconds[1:]):.1f}–{max(seconds[1:]):.1f}"
        rows.append(
            [name, f"{median:.1f} ({span})", f"{ROWS * NEW / median:.0f}", f"{base / median:.1f}×"]
        )
    return rows


def ours(model: str, options: argparse.Namespace, *overrides: str) -> dict[str, float]:
    steps, memory = trained(
        options.tasks, options.tasks, options.steps + 1, f"agent_model.name={model}",
        "reward.target=benchmarks.noise_reward:Noise", *overrides,
    )  # fmt: skip
    seconds = sum(step["step_seconds"] for step in steps)
    generation = sum(step["step_seconds"] * step["time/rollout_share"] for step in steps)
    length = statistics.fmean(step["completion_length_mean"] for step in steps)
    return a_step(options, seconds, generation, length, memory)


def peer(model: str, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    job = peer_job(options, options.tasks) | {"model": model, "reward": "noise", "dtype": dtype}
    job |= {"batch_size": options.tasks, "epochs": options.steps + 1}
    results = runner(PEER / "bin" / "python", "peer_runner.py", job)
    updated = [ended for what, _, ended in results["spans"] if what == "update"]
    first = updated[AGENTS - 1]  # the end of the first step
    generation = sum(
        ended - began
        for what, began, ended in results["spans"]
        if what == "generation" and began >= first
    )
    length = statistics.fmean(results["lengths"][options.tasks * GENERATIONS * AGENTS :])
    return a_step(options, updated[-1] - first, generation, length, results["peak_memory_mb"])


def a_step(
    options: argparse.Namespace, seconds: float, generation: float, length: float, memory: float
) -> dict[str, float]:
    """Return the measures of a mean step; its update is everything except its generation."""
    return {
        "tokens": options.steps * options.tasks * GENERATIONS * AGENTS * length / seconds,
        "generation": generation / options.steps,
        "update": (seconds - generation) / options.steps,
        "length": length,
        "memory": memory,
    }


def show(measurements: dict[str, list[dict[str, float]]]) -> None:
    """Print a table: medians over rounds, tokens per second with their range; empty: unknown."""
    print(
        "| contender | tokens/s (span) | ratio | generation, s | update, s | tokens a completion | "
        "peak memory, MB | ratio |\n|---|---|---|---|---|---|---|---|"
    )
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in measurements.items()
    }
    base = next(iter(medians.values()))
    for name, median in medians.items():
        span = sorted(run["tokens"] for run in measurements[name])
        seconds = [f"{median[p]:.1f}" if p in median else "" for p in ("generation", "update")]
        print(
            f"| {name} | {median['tokens']:.1f} ({span[0]:.1f}–{span[-1]:.1f}) | "
            f"{median['tokens'] / base['tokens']:.1f}× | {seconds[0]} | {seconds[1]} | "
            f"{median['length']:.1f} | {median['memory']:.0f} | "
            f"{median['memory'] / base['memory']:.2f} |"
        )


def trl(folder: str, options: argparse.Namespace) -> dict[str, float]:
    job = peer_job(options, options.tasks * (options.steps + 1), "float32")
    job |= {"bf16": FAST, "model": folder, "batch_size": options.tasks}
    results = runner(sys.executable, "trl_runner.py", job)
    lengths, times = results["lengths"][options.tasks * GENERATIONS :], results["step_times"]
    return one_agent(sum(lengths), times[-1] - times[0], len(lengths), results["peak_memory_mb"])


def ours_grpo(folder: str, options: argparse.Namespace, *overrides: str) -> dict[str, float]:
    steps, memory = trained(
        options.tasks, options.tasks, options.steps + 1, f"agent_model.name={folder}",
        "reward.target=benchmarks.noise_reward:Noise", *overrides, algorithm="grpo",
    )  # fmt: skip
    tokens = sum(step["tokens"] for step in steps)
    seconds = sum(step["step_seconds"] for step in steps)
    return one_agent(tokens, seconds, options.steps * options.tasks * GENERATIONS, memory)


def one_agent(tokens: float, seconds: float, completions: int, memory: float) -> dict[str, float]:
    return {"tokens": tokens / seconds, "length": tokens / completions, "memory": memory}


def whole_steps(folder: str, options: argparse.Namespace) -> None:
    """Print a table for two agents and one for one agent."""
    full = "lora.enabled=false"
    groups: list[dict[str, Callable[[], dict[str, float]]]] = [
        {
            f"peer, 2 agents, all weights, {PRECISION}": lambda: peer(folder, options, PRECISION),
            "ours, 2 agents, all weights": lambda: ours(folder, options, full),
            "ours, 2 agents, LoRA": lambda: ours(folder, options),
        },
        {
            f"TRL GRPO, 1 agent, {PRECISION}": lambda: trl(folder, options),
            "ours GRPO, 1 agent, all weights": lambda: ours_grpo(folder, options, full),
            "ours GRPO, 1 agent, LoRA": lambda: ours_grpo(folder, options),
        },
    ]
    for contenders in groups:
        measurements: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                measurements[name].append(contender())
                print(f"{name}: {measurements[name][-1]}", file=sys.stderr, flush=True)
        show(measurements)
        print(flush=True)


def parts(folder: str, steps: int) -> list[list[str]]:
    keys: dict[str, Any] = {"batch_size": TASKS, "max_new_tokens": 64, "learning_rate": 1e-5}
    medians = measure(
        [f"agent_model.name={folder}", "reward.target=benchmarks.noise_reward:Noise",
         *(f"magrpo.{key}={value}" for key, value in keys.items())],
        fast=True, steps=steps, warm=2,
    )  # fmt: skip
    share = medians["limit"] * 2 / 3 / medians["update"]  # two of the three passes
    return [
        [f"{medians[part]:.1f}" for part in ("generation", "reward", "update", "step")]
        + [f"{100 * share:.0f} %"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="measured in a run, after its first")
    parser.add_argument("--only", choices=["generation", "parts", "steps"])
    parser.set_defaults(device="cpu", tasks=TASKS)
    options = parser.parse_args()
    hide_gpus(options.device)
    if not (options.model / "config.json").exists():
        parser.error(f"--model {options.model}: no model there; make it with `make real-model`")
    with tempfile.TemporaryDirectory() as folder:
        make_endless(options.model, Path(folder))
        if options.only in (None, "generation"):
            head = ["32 rows, 200 + 48 tokens", "seconds (span)", "tokens/s", "ratio"]
            print(table(head, generation(folder, options.rounds)), "\n", flush=True)
        if options.only in (None, "parts"):
            head = ["generation, s", "reward, s", "update, s", "step, s", "update, of the limit"]
            print(table(head, parts(folder, options.steps)), "\n", flush=True)
        if options.only in (None, "steps"):
            make_peer()
            whole_steps(folder, options)


if __name__ == "__main__":
    main()
