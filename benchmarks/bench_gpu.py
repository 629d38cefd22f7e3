"""What a machine does, and how fast tokens are decoded and learned from on it.

    python benchmarks/bench_gpu.py --out DIR [--seconds 530]
    python benchmarks/bench_gpu.py --out DIR --device cpu --tiny

A model of random weights in the shape of Qwen2.5 1.5B, two LoRA agents (r = 16) and nothing that is
downloaded. Every phase is a separate process with a time limit; the first runs ``tests/gpu``, if
pytest is installed. Results are appended to ``DIR/results.jsonl``, one JSON object each, and
``DIR/table.md`` is written after every phase.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from comlrl.update.optimizer import AgentOptimizer

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


def base(device: str, tiny: bool) -> Any:
    """Return a model of random weights that are made on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**(TINY if tiny else SHAPE), max_position_embeddings=4096)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    model.to(dtype=torch.float32 if device == "cpu" else torch.bfloat16).eval()
    with torch.no_grad():  # nuclei of a few tokens, as after training
        model.get_output_embeddings().weight.mul_(10)
    return model


def team(device: str, tiny: bool) -> Team:
    """Return two agents on one base."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(base(device, tiny), lora, adapter_name="agent_0")
    peft.add_adapter("agent_1", lora)
    inner: Any = peft.base_model.model
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
    return Team(agents, shared_base=True)


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


def decoding_ways(device: str) -> tuple[Any, ...]:
    """Return the values of ``generation.decoding``; what is compiled takes a minute more."""
    return ("growing", "static") if device == "cpu" else ("growing", "static", "graphs", "compiled")


def decoding(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of a decoding step of two agents' rows, each way."""
    agents, tokens = team(device, tiny), 8 if tiny else 128
    length, siblings = (12, 2) if tiny else (300, 4)
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
        for way in decoding_ways(device):
            generator = Generator(agents, decoding=way)
            sampling = Sampling(1.0, tokens, top_p=0.9)
            taken = seconds(
                partial(generator.sample, requests_N, sampling), device, 1 if tiny else 2
            )
            what = f"decoding step, {rows} rows, {way}, ms"
            yield {"what": what, "value": taken / tokens * 1e3}


def episodes(tiny: bool) -> tuple[list[list[int]], int]:
    """Return the prompts of a step's tasks, and the tokens of a completion."""
    length, tokens, tasks = (12, 8, 2) if tiny else (300, 256, 4)
    return [list(range(2 + task, 2 + task + length)) for task in range(tasks)], tokens


def gradients(agents: Team, index: int, rows: Sequence[Row]) -> None:
    """Add one agent's gradients over rows."""
    with agents.acting(index) as agent:

        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            logprob_A = action_logprobs(agent, batch, 1.0).logprob_A
            weight_A = batch.weight_RL[batch.action_mask_RL].to(logprob_A)
            return -(weight_A * logprob_A).sum(), Sums(loss=logprob_A)

        accumulate(agent, rows, loss, Sums())


def rows_of(prompts: Sequence[Sequence[int]], ids_PGT: Sequence[Any]) -> list[Row]:
    """Return rows of four completions each, with advantages."""
    return [
        Row(tuple(prompt), tuple(map(tuple, ids_GT)), (1.0, -1.0, 0.5, -0.5),
            tuple(range(4 * number, 4 * number + 4)))
        for number, (prompt, ids_GT) in enumerate(zip(prompts, ids_PGT, strict=True))
    ]  # fmt: skip


def update(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of one agent's gradients by each way of attention, and peak memory."""
    prompts, tokens = episodes(tiny)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 999, (len(prompts), 4, tokens), generator=generator).tolist()
    rows = rows_of(prompts, ids)
    count = sum(row.length for row in rows)
    for way in ("grids", "tree") if device == "cpu" else ("grids", "tree", "compiled"):
        agents = team(device, tiny)
        for agent in agents.agents:
            assert agent.fast is not None
            agent.fast.tree, agent.fast.compiled = way != "grids", way == "compiled"
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        taken = seconds(partial(gradients, agents, 0, rows), device, 1 if tiny else 3)
        yield {"what": f"update, {count} tokens, {way}, ms", "value": taken * 1e3}
        if device != "cpu":
            peak = torch.cuda.max_memory_allocated() / 1e9
            yield {"what": f"update, {way}, peak memory, GB", "value": peak}


def steps(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of a step without its reward: both agents sample, learn and are stepped."""
    prompts, tokens = episodes(tiny)
    agents = team(device, tiny)
    optimizers = [AgentOptimizer(a.parameters(), 1e-5, max_grad_norm=1.0) for a in agents.agents]
    requests_N = [
        [
            Request(tuple(prompt), tuple((i, p, g) for g in range(4)))
            for p, prompt in enumerate(prompts)
        ]
        for i in range(2)
    ]
    sampling = Sampling(1.0, tokens, top_p=0.9)

    def step(generator: Generator) -> None:
        written_N = generator.sample(requests_N, sampling)
        for index, (written, optimizer) in enumerate(zip(written_N, optimizers, strict=True)):
            optimizer.zero()
            ids = [[completion.token_ids for completion in group] for group in written]
            gradients(agents, index, rows_of(prompts, ids))
            optimizer.step(0.0)

    for way in decoding_ways(device):
        generator = Generator(agents, decoding=way)
        taken = seconds(partial(step, generator), device, 1 if tiny else 3)
        yield {"what": f"step, {len(prompts)} tasks, {way}, s", "value": taken}


def peer(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of the same step as CoMLRL 1.4.3 makes it, written anew.

    Each agent is a separate model, all of whose weights are trained; transformers' ``generate``
    samples one task at a time; each completion is a forward pass by itself. All tasks make one
    update.
    """
    prompts, tokens = episodes(tiny)
    models = [base(device, tiny) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-5) for model in models]

    def learn(model: Any, ids_GL: torch.Tensor, length: int) -> None:
        for ids_L, advantage in zip(ids_GL, (1.0, -1.0, 0.5, -0.5), strict=True):
            logits = model(ids_L[None, :-1]).logits[0, length - 1 :]
            logprob = logits.log_softmax(-1).gather(-1, ids_L[length:, None]).sum()
            (-advantage * logprob / len(ids_GL) / len(prompts)).backward()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            for model in models:
                with torch.no_grad():
                    ids_GL = model.generate(
                        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_p=0.9,
                        top_k=0, num_return_sequences=4, min_new_tokens=tokens,
                        max_new_tokens=tokens, eos_token_id=1, pad_token_id=0,
                    )  # fmt: skip
                learn(model, ids_GL, len(prompt))
        for optimizer in optimizers:
            optimizer.step()

    taken = seconds(step, device, 1)
    yield {"what": f"step of CoMLRL 1.4.3's loop, {len(prompts)} tasks, s", "value": taken}


def tests(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield how many of ``tests/gpu`` passed, and how many did not, which fails the phase."""
    if importlib.util.find_spec("pytest") is None:
        return
    folder = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "tests/gpu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout)
    last = done.stdout.strip().rpartition("\n")[2]
    for word in ("passed", "failed", "errors?", "skipped"):
        if count := re.search(rf"(\d+) {word}", last):
            yield {"what": f"tests/gpu, {word.rstrip('s?')}", "value": int(count[1])}
    if done.returncode:
        raise SystemExit(done.returncode)


PHASES = {
    "tests": tests,
    "machine": machine,
    "decoding": decoding,
    "update": update,
    "steps": steps,
    "peer": peer,
}


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
    results.touch()  # for the table, if the first phase has no results
    end, failed = time.monotonic() + arguments.seconds, 0
    for phase in PHASES:
        if phase == "tests" and arguments.device == "cpu":
            continue  # the tests need a GPU
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
