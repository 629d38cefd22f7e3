"""What a machine does, and how fast tokens are decoded and learned from on it.

    python benchmarks/bench_gpu.py --out DIR [--seconds 530]
    python benchmarks/bench_gpu.py --out DIR --device cpu --tiny

A model of random weights in the shape of Qwen2.5 1.5B, two LoRA agents (r = 16) and nothing that is
downloaded. Every phase is a separate process with a time limit. Results are appended to
``DIR/results.jsonl``, one JSON object each, and ``DIR/table.md`` is written after every phase.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from comlrl.models.agent import Agent
from comlrl.models.fast.decoder import fast_decoder
from comlrl.models.fast.lora_routing import add_router
from comlrl.models.logprobs import action_logprobs
from comlrl.models.team import Team
from comlrl.processes.statistics import Sums
from comlrl.rollout.generation import Generator
from comlrl.trainers.launch.wiring.machine import deterministic
from comlrl.types import Request, Row, Sampling, TokenBatch
from comlrl.update.accumulate import accumulate

SHAPE: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip


class Stub:
    """A tokenizer of numbers."""

    eos_token_id, pad_token_id = 1, 0

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return ["" for _ in ids]


def team(device: str, tiny: bool) -> Team:
    """Two agents on random weights that are made on the device."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**(TINY if tiny else SHAPE), max_position_embeddings=4096)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    model.to(dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(model.eval(), lora, adapter_name="agent_0")
    peft.add_adapter("agent_1", lora)
    inner: Any = peft.base_model.model
    with torch.no_grad():  # nuclei of a few tokens, as after training
        inner.get_output_embeddings().weight.mul_(5)
    router = add_router(inner)
    fast = fast_decoder(inner, router, ["agent_0", "agent_1"])
    agents = [
        Agent(index=i, model=inner, tokenizer=Stub(), peft=peft, router=router, fast=fast)
        for i in range(2)
    ]
    for agent in agents:
        agent.__dict__["stop_ids"] = ()  # all completions have their full length
        for parameter in agent.parameters():
            parameter.requires_grad_(True)
    return Team(agents, shared_base=True, full=False)


def seconds(work: Callable[[], object], device: str, repeat: int) -> float:
    """Return the least time of a call, after a first that is not counted."""
    times = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def machine(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the rates of copies and products, and the time to start a kernel."""
    size = 256 if tiny else 8192
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(size, size, dtype=dtype, device=device)
    y, small = torch.empty_like(x), torch.zeros(1, device=device)
    yield {
        "what": "copy, GB/s",
        "value": 2 * x.nbytes / seconds(lambda: y.copy_(x), device, 5) / 1e9,
    }
    product = seconds(lambda: torch.mm(x, x, out=y), device, 5)
    yield {"what": "product, TFLOP/s", "value": 2 * size**3 / product / 1e12}
    count = 100 if tiny else 2000
    started = seconds(lambda: [small.add_(1) for _ in range(count)], device, 3)
    yield {"what": "start of a kernel, µs", "value": started / count * 1e6}


def decoding(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of a decoding step of two agents' rows, each way."""
    agents, tokens = team(device, tiny), 8 if tiny else 128
    length, siblings = (12, 2) if tiny else (300, 4)
    ways: tuple[Any, ...] = (
        ("growing", "static") if device == "cpu" else ("growing", "static", "graphs")
    )
    for rows in (8,) if tiny else (8, 32, 128):
        requests_N = [
            [
                Request(
                    tuple(range(2 + p, 2 + p + length)), tuple((i, p, g) for g in range(siblings))
                )
                for p in range(rows // siblings // 2)
            ]
            for i in range(2)
        ]
        for way in ways:
            generator = Generator(agents, decoding=way)
            sampling = Sampling(1.0, tokens, top_p=0.9)
            taken = seconds(
                partial(generator.sample, requests_N, sampling), device, 1 if tiny else 2
            )
            what = f"decoding step, {rows} rows, {way}, ms"
            yield {"what": what, "value": taken / tokens * 1e3}


def update(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of one agent's gradients, and peak memory on a GPU."""
    agents = team(device, tiny)
    length, tokens, tasks = (12, 8, 2) if tiny else (300, 256, 4)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for task in range(tasks):
        ids = torch.randint(2, 999, (4, tokens), generator=generator).tolist()
        prompt = tuple(range(2 + task, 2 + task + length))
        numbers = tuple(range(4 * task, 4 * task + 4))
        rows.append(Row(prompt, tuple(map(tuple, ids)), (1.0, -1.0, 0.5, -0.5), numbers))
    with agents.acting(0) as agent:

        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            logprob_A = action_logprobs(agent, batch, 1.0).logprob_A
            return -logprob_A.mean(), Sums(loss=logprob_A)

        sums = Sums()
        taken = seconds(lambda: accumulate(agent, rows, loss, sums), device, 1 if tiny else 3)
    count = sum(row.length for row in rows)
    yield {"what": f"update, {count} tokens, ms", "value": taken * 1e3}
    if device != "cpu":
        yield {"what": "peak memory, GB", "value": torch.cuda.max_memory_allocated() / 1e9}


PHASES = {"machine": machine, "decoding": decoding, "update": update}


def write_table(out: Path) -> None:
    """Write the results so far as a Markdown table."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    values = [f"{line['value']:.4g}" if "value" in line else "–" for line in lines]
    cells = [
        f"| {x['phase']} | {x['what']} | {value} |" for x, value in zip(lines, values, strict=True)
    ]
    head = ["| phase | measured | value |", "|---|---|---|"]
    (out / "table.md").write_text("\n".join([*head, *cells]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl, table.md")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--seconds", type=float, default=530, help="limit of all phases")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    if arguments.phase:
        deterministic()
        for line in PHASES[arguments.phase](arguments.device, arguments.tiny):
            with results.open("a") as file:
                file.write(json.dumps({"phase": arguments.phase, **line}) + "\n")
        return 0
    end, failed = time.monotonic() + arguments.seconds, 0
    for phase in PHASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--phase", phase]
        try:
            code = subprocess.run(command, timeout=max(1.0, end - time.monotonic())).returncode
            reason = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, "time limit"
        if code:
            failed += 1
            with results.open("a") as file:
                file.write(json.dumps({"phase": phase, "what": reason}) + "\n")
        write_table(out)
    print((out / "table.md").read_text())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
