"""Log-probabilities of packed rows against one unpadded sequence at a time, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comlrl.models import logprobs
from comlrl.models.logprobs import action_logprobs, packable
from comlrl.models.rows import pack, unpacked
from comlrl.types import Row, SamplingSupport
from tests.support.plain import near
from tests.support.tiny_models import EOS, PAD, prompt, team

TEMPERATURE = 0.7
ROWS = [
    Row(prompt("def f(x):\n"), ((*prompt("  return x"), EOS), prompt("pass"), (EOS,)),
        (0.5, -0.25, 2.0), (0, 1, 2)),
    Row(prompt("a longer prompt than the other one"), (prompt("b"), (*prompt("cd"), EOS)),
        (1.0, -1.0), (3, 4)),
]  # fmt: skip


def sets(length: int, at: int) -> SamplingSupport:
    """Of each position 0, 1, 2, … letters or, where there are none, a threshold."""
    counts = torch.arange(length) % 4
    ids = (torch.arange(int(counts.sum())) * (7 + at)) % 250
    threshold = torch.where(counts == 0, -5.5, torch.inf)
    return SamplingSupport(counts.int(), ids.int(), threshold)


CUT = [
    replace(row, support=tuple(sets(len(ids), at) for at, ids in enumerate(row.completions)))
    for row in ROWS
]


def plainly(agent, rows, entropy: bool = False):
    """log π of every token of every completion, one sequence at a time, in the rows' order."""
    parts = []
    for row in rows:
        for at, ids in enumerate(row.completions):
            logits = agent.model(torch.tensor([[*row.prompt_ids, *ids]])).logits[0]
            # The token at position l is chosen by the distribution at l − 1.
            chosen = (logits[len(row.prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            if row.support:
                chosen = over(chosen, row.support[at], ids)
            if entropy:
                parts.append(-(chosen.exp() * chosen).nan_to_num().sum(-1))
            else:
                parts.append(chosen.gather(-1, torch.tensor(ids)[:, None])[:, 0])
    return torch.cat(parts)


def over(logprob_LV: torch.Tensor, support: SamplingSupport, ids) -> torch.Tensor:
    """A position at a time: its support, or what is above the threshold, and the chosen token."""
    rest = iter(support.ids_I.tolist())
    for position, token in enumerate(ids):
        count, least = int(support.counts_L[position]), support.threshold_L[position]
        left = {token, *(next(rest) for _ in range(count))}
        left |= {t for t, value in enumerate(logprob_LV[position].tolist()) if value >= least}
        cut = torch.full_like(logprob_LV[position], -torch.inf)
        cut[list(left)] = logprob_LV[position][list(left)]
        logprob_LV = logprob_LV.index_copy(0, torch.tensor([position]), cut.log_softmax(-1)[None])
    return logprob_LV


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [ROWS, CUT], ids=["all", "truncated"])
def test_packed_is_one_at_a_time(kind, attention, rows):
    agents = team(kind, agent_model__attn_implementation=attention)
    for index in range(2):
        with agents.acting(index) as agent, torch.no_grad():
            assert packable(agent)
            policy = action_logprobs(agent, pack(rows, PAD), TEMPERATURE, entropy=True)
            assert policy.logprob_A.dtype == torch.float64
            # transformers' eager attention takes its softmax in float32.
            tolerance = 1e-10 if attention == "sdpa" else 1e-5
            assert near(policy.logprob_A, plainly(agent, rows), tolerance)
            assert near(policy.entropy_A, plainly(agent, rows, entropy=True), tolerance)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "qwen3 with a window", "gemma2"])
def test_unpacked_is_one_at_a_time(kind):
    # transformers' eager attention is in float32; in float64 its masks become infinite there.
    agents = team(kind, dtype="float32" if kind == "gemma2" else "float64")
    with agents.acting(0) as agent, torch.no_grad():
        assert packable(agent) == (kind == "qwen2")  # others' windows are shorter than these rows
        alone = unpacked(ROWS)
        logprob_A = action_logprobs(agent, pack(alone, PAD), TEMPERATURE).logprob_A
        assert near(logprob_A, plainly(agent, alone), 1e-5 if kind == "gemma2" else 1e-10)


def test_agents_differ_and_the_reference_is_the_base():
    agents = team()
    batch = pack(ROWS, PAD)
    with torch.no_grad():
        with agents.acting(0) as agent:
            first = action_logprobs(agent, batch, 1.0).logprob_A
            with agents.reference(0) as reference:
                base = action_logprobs(reference, batch, 1.0).logprob_A
            assert torch.equal(action_logprobs(agent, batch, 1.0).logprob_A, first)
        with agents.acting(1) as agent:
            second = action_logprobs(agent, batch, 1.0).logprob_A
    assert min((first - second).abs().max(), (first - base).abs().max()) > 0.01


@pytest.mark.parametrize("rows", [ROWS, CUT], ids=["all", "truncated"])
@pytest.mark.parametrize("lora", [True, False], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("entropy", [True, False])
def test_a_head_in_chunks_is_the_whole_head(rows, lora, entropy, monkeypatch):
    agents = team(lora__enabled=lora)
    batch = pack(rows, PAD)

    def gradients():
        with agents.acting(0) as agent:
            policy = action_logprobs(agent, batch, TEMPERATURE, entropy=entropy)
            loss = policy.logprob_A.square().sum()
            (loss + policy.entropy_A.sum() if entropy else loss).backward()
            found = [p.grad.clone() for p in agent.parameters()]
            for parameter in agent.parameters():
                parameter.grad = None
        return policy, found

    whole, whole_gradient = gradients()
    monkeypatch.setattr(logprobs, "HEAD_CHUNK_BYTES", 4 * 300 * 3)  # three actions at a time
    monkeypatch.setitem(logprobs.PIECE_BYTES, "cpu", 4 * 300 * 2)  # in two pieces
    parts, parts_gradient = gradients()
    assert near(parts.logprob_A, whole.logprob_A)
    with agents.acting(0) as agent, torch.no_grad():
        measured = action_logprobs(agent, batch, TEMPERATURE, entropy=entropy)
    assert near(measured.logprob_A, whole.logprob_A) and not measured.logprob_A.requires_grad
    assert near(parts.entropy_A, whole.entropy_A) if entropy else parts.entropy_A is None
    for a, b in zip(parts_gradient, whole_gradient, strict=True):
        assert near(a, b)


def test_padding_has_no_influence_at_all():
    agents = team(lora__enabled=False)
    found = []
    for pad in (PAD, 5):  # an unused token, and one that prompts use
        with agents.acting(0) as agent:
            logprob_A = action_logprobs(agent, pack(ROWS, pad), TEMPERATURE).logprob_A
            logprob_A.sum().backward()
            found.append([p.grad.clone() for p in agent.parameters()])
            embedding = agent.model.get_input_embeddings().weight
            if pad == PAD:  # embeddings are not tied: a row's gradient is its tokens' as input
                assert embedding.grad[PAD].abs().max() == 0
                assert embedding.grad[prompt("x")[0]].abs().max() > 0
            for parameter in agent.parameters():
                parameter.grad = None
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_the_last_token_and_the_end_of_sequence_count():
    # The completion (EOS,) alone is the last of the first row: its one token is an action.
    agents = team()
    with agents.acting(0) as agent, torch.no_grad():
        logprob_A = action_logprobs(agent, pack(ROWS, PAD), TEMPERATURE).logprob_A
        lengths = [len(ids) for row in ROWS for ids in row.completions]
        assert len(logprob_A) == sum(lengths) == 11 + 4 + 1 + 1 + 3
        only_end = agent.model(torch.tensor([ROWS[0].prompt_ids])).logits[0, -1] / TEMPERATURE
        assert near(logprob_A[11 + 4], only_end.log_softmax(-1)[EOS])
