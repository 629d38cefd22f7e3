"""A model of a real shape against the peer: tokens a second, generation and update apart, memory.

    python benchmarks/bench_real_shape.py [--rounds 1] [--steps 1] [--tasks 2]

A Qwen2 of 12 layers, width 640 and Qwen's vocabulary of 151,936 with random weights, 168M
parameters, and two agents; the same start weights, tasks, prompts, G = 4 and temperature 1 for all,
and one update for ``--tasks`` tasks. The end-of-sequence token lies after the vocabulary, where no
policy can sample it, so that all completions have 64 tokens, on both sides. The reward is a hash of
the texts: it costs nothing, and no group of completions has equal rewards, which would leave
nothing to update. The learning rate is 1e-5. The peer (comlrl 1.4.3, in ``.venv-peer``, which is
made here if missing) trains all weights, in float32 and in the bfloat16 of the model's file, which
is its own default; ours all weights in float32, and all weights and LoRA in the machine's own
precision. Every number comes from its own process; contenders alternate, and the table gives
medians over rounds of a mean step, the first of each run left out. "Update" is all of a step but
generation.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_memory import make_model
from bench_train_step import GENERATIONS, PEER, make_peer, peer_job, runner, trained

AGENTS = 2
VOCABULARY = 151_936


def make_endless(folder: Path, width: int, layers: int) -> int:
    """Save a random model that cannot end a completion; returns its number of parameters.

    The embedded tokenizer gets a word for each further token of the vocabulary, so that every
    sampled token has a text, and an end-of-sequence token that is not among them.
    """
    parameters = make_model(folder, width, layers, vocab_size=VOCABULARY, eos_token_id=None)
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer, tokenizer_config = json.loads(file.read_text()), json.loads(settings.read_text())
    words = tokenizer["model"]["vocab"]
    free = set(range(VOCABULARY)) - set(words.values())
    words |= {f"w{i}": i for i in free} | {"<|never|>": VOCABULARY}
    end_token = next(token for token in tokenizer["added_tokens"] if token["content"] == "<|end|>")
    tokenizer["added_tokens"].append(end_token | {"id": VOCABULARY, "content": "<|never|>"})
    file.write_text(json.dumps(tokenizer))
    settings.write_text(json.dumps(tokenizer_config | {"eos_token": "<|never|>"}))
    return parameters


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1, help="measured in a run, after its first")
    parser.add_argument("--tasks", type=int, default=2, help="a step")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=12)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    make_peer()
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_endless(Path(folder), options.width, options.layers)
        contenders: dict[str, Callable[[], dict[str, float]]] = {
            "peer, all weights, float32": lambda: peer(folder, options, "float32"),
            "peer, all weights, bfloat16": lambda: peer(folder, options, "bfloat16"),
            "ours, all weights, float32": lambda: ours(
                folder, options, "lora.enabled=false", "agent_model.torch_dtype=float32"
            ),
            "ours, all weights (default)": lambda: ours(folder, options, "lora.enabled=false"),
            "ours, LoRA (default)": lambda: ours(folder, options),
        }
        measurements: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                began = time.monotonic()
                measurements[name].append(contender())
                seconds = time.monotonic() - began
                print(f"{name}: {measurements[name][-1]} ({seconds:.0f} s)", file=sys.stderr)
    print(f"model of {parameters / 1e6:.0f}M parameters, {options.tasks} tasks × G = {GENERATIONS}")
    show(measurements)


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


if __name__ == "__main__":
    main()
