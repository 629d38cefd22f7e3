"""What only a GPU can show; ``benchmarks/bench_gpu.py`` runs these there."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.models.team import Team
from comlrl.processes.statistics import Sums
from comlrl.rollout.generation import Generator
from comlrl.trainers.launch.wiring.machine import deterministic
from comlrl.types import Request, Row, Sampling, TokenBatch
from comlrl.update.accumulate import accumulate
from tests.support.runs import Zygote, assert_same, small
from tests.support.tiny_models import PAD, prompt, team

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

WAYS = {
    "greedy": Sampling(0.0, 24),
    "plain": Sampling(1.0, 24),
    "top_p": Sampling(0.8, 24, top_p=0.9),
}
REQUESTS = [
    [
        Request(prompt(text), tuple((3, text, agent, g) for g in range(4)))
        for text in ("a", "def f(x):\n    return", "another prompt")
    ]
    for agent in range(2)
]
ROWS = [
    Row(prompt("def f(x):\n"), (prompt("  return x"), prompt("  return y"), prompt("pass")),
        (0.5, -0.25, 2.0), (0, 1, 2)),
    Row(prompt("a longer prompt"), (prompt("b"), prompt("cd")), (1.0, -1.0), (3, 4)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def strict() -> None:
    deterministic()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_sample_what_their_steps_do_without_them(way: str, dtype: str) -> None:
    agents = team(dtype=dtype, device="cuda")
    wanted = Generator(agents, decoding="static").sample(REQUESTS, WAYS[way])
    generator = Generator(agents, decoding="graphs")
    assert generator.sample(REQUESTS, WAYS[way]) == wanted  # captured
    assert generator.sample(REQUESTS, WAYS[way]) == wanted  # replayed
    assert generator.static is not None
    ((_, _, graphs),) = generator.static.states.values()
    assert graphs.capturing and len(graphs.graphs) == 2


def test_the_host_waits_for_nothing_within_replayed_steps() -> None:
    generator = Generator(team(device="cuda"), decoding="graphs")
    generator.sample(REQUESTS, WAYS["top_p"])
    assert generator.static is not None
    ((batch, draw, graphs),) = generator.static.states.values()
    batch.t.zero_()
    draw.going_R.fill_(True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(16):
            graphs.graphs["draw"].replay()
            graphs.graphs["step", 64].replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(batch.t) == 16


def test_compiled_layers_sample_the_same_twice() -> None:
    agents = team(dtype="float32", device="cuda")
    generator = Generator(agents, decoding="compiled")
    first = generator.sample(REQUESTS, WAYS["top_p"])
    assert generator.sample(REQUESTS, WAYS["top_p"]) == first
    # A compiler rounds otherwise, by which a token may change: not many do.
    plain = Generator(agents, decoding="static").sample(REQUESTS, WAYS["top_p"])
    pairs = [
        (a.token_ids, b.token_ids)
        for groups in zip(itertools.chain(*first), itertools.chain(*plain), strict=True)
        for a, b in zip(*groups, strict=True)
    ]
    assert sum(a == b for a, b in pairs) > 0.8 * len(pairs)


def gradients(agents: Team) -> list[torch.Tensor]:
    with agents.acting(0) as agent:

        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            logprob_A = action_logprobs(agent, batch, 1.0).logprob_A
            return (logprob_A * batch.weight_RL[batch.action_mask_RL].to(logprob_A)).sum(), Sums()

        accumulate(agent, ROWS, loss, Sums())
        return [p.grad for p in agent.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_twice_from_one_seed_has_the_same_bits(dtype: str) -> None:
    runs = []
    for _ in range(2):
        agents = team(dtype=dtype, device="cuda")
        written = Generator(agents).sample(REQUESTS, WAYS["top_p"])
        runs.append((written, gradients(agents)))
    (written, first), (again, second) = runs
    assert written == again and len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("way", ["tree", "compiled"])
def test_one_mask_computes_what_the_grids_do(way: str) -> None:
    values = []
    for attention in ("grids", way, way):
        agents = team("qwen3", dtype="float32", device="cuda")  # heads of 16, FlexAttention's least
        for agent in agents.agents:
            assert agent.fast is not None
            agent.fast.tree = attention != "grids"
            agent.fast.compiled = attention == "compiled"
        values.append(gradients(agents))
    grids, first, second = values
    for a, b, c in zip(grids, first, second, strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-3  # products may be in TF32
        assert torch.equal(b, c)


def test_a_card_computes_what_a_cpu_does() -> None:
    values = []
    for device in ("cpu", "cuda"):
        with team(device=device).acting(0) as agent, torch.no_grad():
            values.append(action_logprobs(agent, pack(ROWS, PAD), 0.7).logprob_A.cpu())
    # transformers computes angles in float32, whose cosines are not the same on both.
    torch.testing.assert_close(*values, rtol=0, atol=1e-5)


def test_a_run_killed_and_resumed_has_the_bits_of_an_undisturbed_one(
    zygote: Zygote, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    zygote.finish("magrpo", small("magrpo", whole))
    zygote.kill_and_resume("magrpo", small("magrpo", folder), folder)
    assert_same(folder, whole)
