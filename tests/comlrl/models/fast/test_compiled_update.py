"""Compiled layers of the update against the same without compilation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from comlrl.models.fast import compiled_update
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.processes.statistics import Sums
from comlrl.types import TokenBatch
from comlrl.update.accumulate import accumulate, micro_batches
from tests.support.plain import near, relative
from tests.support.shared_tokens import CASES, logprobs_and_gradients, numbered, row
from tests.support.tiny_models import PAD, team

ROWS = numbered([row("p" * 5 * n, "ab" * n + "c.", "abd." * n, "b" * n) for n in range(1, 6)])


@pytest.fixture
def backend(monkeypatch):
    """Counts graphs; ``fullgraph`` raises at what dynamo cannot take into one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(compiled_update, "compiled", functools.cache(compiled))
    monkeypatch.setattr(compiled_update, "TOKEN_STEP", 128)
    return counter


def built(way: str, **keys):
    agents = team(agent_model__update_attention=way, **keys)
    assert agents.agents[0].fast.compiled == (way == "compiled")
    return agents


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
def test_compiled_layers_compute_what_others_do(kind, lora, backend):
    plain, compiled = (built(way, kind=kind, lora__enabled=lora) for way in ("grids", "compiled"))
    for rows in CASES.values():
        values = [logprobs_and_gradients(a, numbered(rows), True) for a in (plain, compiled)]
        assert all(near(a, b, 1e-11) for a, b in zip(*values, strict=True))
    assert backend.frame_count == 2  # before and after attention


def gradients(agents, index: int) -> None:
    """Of the log-probabilities of ``ROWS``, in several micro-batches."""
    with agents.acting(index) as agent:
        agent.micro_batch_tokens = 64  # several of other lengths

        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            logprob_A = action_logprobs(agent, batch, 0.7).logprob_A
            return (logprob_A * batch.weight_RL[batch.action_mask_RL].to(logprob_A)).sum(), Sums()

        assert len(list(micro_batches(agent, ROWS))) > 2
        accumulate(agent, ROWS, loss, Sums())


def read(agents, index: int) -> torch.Tensor:
    with agents.acting(index) as agent, torch.no_grad():
        return action_logprobs(agent, pack(ROWS[:2], PAD), 0.7).logprob_A


@pytest.mark.slow
def test_several_updates_of_three_agents_compile_once(backend):
    """The last agent is frozen; LoRA is in some layers of a product."""
    keys = {
        "kind": "qwen3",
        "num_agents": 3,
        "lora__target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    frozen, values, counts = {"main": {"train": False}}, [], []
    for way in ("grids", "compiled"):
        agents = built(way, agents=frozen, **keys)
        trained = [p for agent in agents.agents for p in agent.parameters()]
        before, optimizer = [p.detach().clone() for p in trained], torch.optim.SGD(trained, 1e-4)
        assert not agents.agents[2].parameters()
        for _ in range(3):
            optimizer.zero_grad()
            for index in (0, 1):
                gradients(agents, index)
                counts.append(backend.frame_count)
            optimizer.step()
        moved = [(p.detach() - b).flatten() for p, b in zip(trained, before, strict=True)]
        values.append(torch.cat(moved))
        values += [read(agents, index) for index in range(3)]
    assert all(relative(a, b) < 1e-9 for a, b in zip(values[4:], values[:4], strict=True))
    with agents.acting(0) as agent:  # a pass without gradients has the bits of the update
        logprob_A = action_logprobs(agent, pack(ROWS[:2], PAD), 0.7).logprob_A
    assert logprob_A.requires_grad and torch.equal(logprob_A, values[5])
    assert set(counts[6:]) == {3}  # the layer's two and the head's one, from the first agent on
    assert backend.frame_count == 3 + 2  # of the frozen agent's layers


@pytest.mark.parametrize(
    "keys", [{"agent_model__gradient_checkpointing": True}, {"lora__dropout": 0.1}]
)
def test_what_needs_the_modules_is_not_compiled(keys, backend):
    agents = team(agent_model__update_attention="compiled", **keys)
    assert not agents.agents[0].fast.compiled
    gradients(agents, 0)
    assert backend.frame_count == 0


@pytest.mark.runs
def test_inductor_computes_what_others_do(monkeypatch):
    monkeypatch.setattr(compiled_update, "TOKEN_STEP", 256)
    torch._dynamo.reset()
    values = []
    for way in ("grids", "compiled"):
        agents = built(way)
        gradients(agents, 0)
        values.append(torch.cat([p.grad.flatten() for p in agents.agents[0].parameters()]))
    assert relative(values[1], values[0]) < 1e-9
