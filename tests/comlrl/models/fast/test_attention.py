"""Attention of a CPU in bfloat16 by products, against the plain formula in float64."""

from __future__ import annotations

import pytest
import torch

from comlrl.models.fast import attention
from comlrl.models.fast.attention import FEW_KEYS, AttentionMask, attend


def plain(query, key, value, seen, scaling):
    """softmax(s q kᵀ) v, each query head with the key head of its group."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = scaling * torch.einsum("shqw,shkw->shqk", query, key)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("shqk,shkw->shqw", weights, value)


def sample(queries: int, keys: int, heads: int = 6, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries)
    shapes = ((3, heads, queries, 16), (3, kv_heads, keys, 16), (3, kv_heads, keys, 16))
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.detach().double() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_plain_formula_and_its_gradients(causal):
    queries, keys = (11, 11) if causal else (5, 12)
    plan = sample(queries, keys)
    exact = [x.detach().double().requires_grad_() for x in plan]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(3, 1, -1, -1)
    if not causal:  # each of the batch sees other keys
        seen = seen & (torch.arange(keys) != torch.arange(3)[:, None])[:, None, None]
    wanted = plain(*exact, seen, 0.25)
    found = attend(*plan, None if causal else AttentionMask(seen), 0.25)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = torch.autograd.grad(found, plan, upstream)
    of_exact = torch.autograd.grad(wanted, exact, upstream.double())
    # One rounding to bfloat16 is off by 2⁻⁹ = 0.002 at most: here there are two, then three.
    assert off(found, wanted) < 0.004
    assert all(off(a, b) < 0.006 for a, b in zip(gradients, of_exact, strict=True))


def test_many_keys_and_other_precisions_go_through_torchs_own(monkeypatch):
    def refuse(*_):
        raise AssertionError("weights of many keys would be kept")

    monkeypatch.setattr(attention.ByProducts, "apply", refuse)
    attend(*sample(2, FEW_KEYS + 1), AttentionMask(torch.ones(3, 1, 2, FEW_KEYS + 1).bool()), 0.25)
    attend(*(x.float() for x in sample(4, 4)), None, 0.25)
    with pytest.raises(AssertionError, match="many keys"):
        attend(*sample(4, 4), None, 0.25)


def test_off_the_cpu_masked_attention_has_a_key_head_for_each_query_head(monkeypatch):
    """torch's memory-efficient kernel takes a mask, but no grouped heads; flash the reverse."""
    calls = []

    def record(query, key, value, mask, *, enable_gqa, **_):
        calls.append((key.shape[1], value.shape[1], enable_gqa))
        return query

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", record)
    query, key, value = (x.detach().to("meta") for x in sample(5, 12))
    seen = torch.ones(3, 1, 5, 12, dtype=torch.bool, device="meta")
    attend(query, key, value, AttentionMask(seen), 0.25)
    attend(query, key, value, None, 0.25)
    assert calls == [(6, 6, False), (2, 2, True)]
