"""Attention in the form that is fastest on each device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_KEYS = 256  # up to this number, storing attention weights for the backward pass is cheap


def wide(x: Tensor) -> Tensor:
    """Convert bfloat16 on a CPU to float32, for torch's attention.

    The bfloat16 kernels of CPUs are slower, several times so in the backward pass.
    """
    return x.float() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query attends to: bool, (S, 1, C, K)."""

    mask: Tensor

    @cached_property
    def bias(self) -> Tensor:
        """The mask as an additive bias of the scores: −∞ where it is False."""
        return torch.zeros(self.mask.shape).masked_fill_(~self.mask, -torch.inf)

    def to(self, device: torch.device) -> AttentionMask:
        return AttentionMask(self.mask.to(device))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask | None, scaling: float
) -> Tensor:
    """Return attention; queries (S, heads, C, W), keys (S, kv heads, K, W); mask None: causal."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if wide(query) is not query and key.shape[2] <= FEW_KEYS:
        C = query.shape[2]
        if mask is None:
            mask = AttentionMask(torch.ones(1, 1, C, C, dtype=torch.bool).tril())
        return ByProducts.apply(query, key, value, mask.bias, scaling)
    if mask is not None and query.device.type != "cpu":
        # Only torch's math kernel takes a mask and grouped heads at once.
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        kv_heads = heads
    out = F.scaled_dot_product_attention(
        wide(query),
        wide(key),
        wide(value),
        None if mask is None else mask.mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return out.to(query.dtype)


class ByProducts(torch.autograd.Function):
    """softmax(s q kᵀ) v for few keys; the weights are saved for the backward pass.

    Scores and softmax are float32; weights and the other products have the dtype of the arguments.
    All query heads of a key head form one product.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float
    ) -> Tensor:
        S, heads, C, W = query.shape
        kv_heads, K = key.shape[1:3]
        folded = query.reshape(S, kv_heads, -1, W)
        scores = folded.float().mul_(scaling) @ key.float().transpose(-1, -2)
        scores.view(S, heads, C, K).add_(bias)
        weights = torch.softmax(scores, -1).to(value.dtype)
        ctx.save_for_backward(folded, key, value, weights)
        ctx.scaling = scaling
        return (weights @ value).view(S, heads, C, W)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        grad = grads[0].reshape(query.shape)
        for_weights = grad @ value.transpose(-1, -2)
        for_scores = torch.ops.aten._softmax_backward_data(
            for_weights, weights, -1, weights.dtype
        ).mul_(ctx.scaling)
        for_query = (for_scores @ key).view(grads[0].shape)
        for_key = for_scores.transpose(-1, -2) @ query
        return for_query, for_key, weights.transpose(-1, -2) @ grad, None, None
