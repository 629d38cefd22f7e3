"""A decoder layer as two functions for torch.compile: before and after attention.

All layers and agents share them, because weights and adapters are arguments. Each is compiled once
per number of tokens, which is a multiple of ``TOKEN_STEP``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.products import ProductTensors, joint_matrices

TOKEN_STEP = 1024


def call(function: Callable[..., Tensor], activations: Sequence[Tensor], *others: Any) -> Tensor:
    """Call the compiled version of a function.

    Activations always require gradients, so that the first layer and passes without gradients use
    the same graph. Their log-probabilities then equal those of the update bit for bit.
    """
    inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in activations]
    with torch.enable_grad():
        y = compiled(function)(*inputs, *others)
    return y if torch.is_grad_enabled() else y.detach()


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)  # shapes of batches
    return torch.compile(function, fullgraph=True, dynamic=False)


def before_attention(
    x: Tensor,
    norm: Tensor,
    qkv: ProductTensors,
    head_norms: Sequence[Tensor],
    cos_sin: tuple[Tensor, Tensor],
    heads: Sequence[int],
    eps: float,
) -> Tensor:
    """Return queries, keys and values: (T, D) → (T, heads + 2 kv_heads, width).

    ``head_norms``: weights for queries and keys, or empty; ``heads``: numbers of query, key and
    value heads.
    """
    cos, sin = cos_sin
    y = linear(F.rms_norm(x, norm.shape, norm, eps), qkv).view(len(x), sum(heads), -1)
    query, key, values = y.split(heads, 1)
    if head_norms:
        query, key = (
            F.rms_norm(part, weight.shape, weight, eps)
            for part, weight in zip((query, key), head_norms, strict=True)
        )
    turned = torch.cat([query, key], 1)
    turned = turned * cos + turned.roll(turned.shape[-1] // 2, -1) * sin
    return torch.cat([turned, values], 1)


def after_attention(
    x: Tensor,
    attention: Tensor,
    out: ProductTensors,
    norm: Tensor,
    gate_up: ProductTensors,
    down: ProductTensors,
    eps: float,
) -> Tensor:
    """Return the layer's output, (T, D)."""
    x = x + linear(attention, out)
    gate, up = linear(F.rms_norm(x, norm.shape, norm, eps), gate_up).chunk(2, -1)
    return x + linear(F.silu(gate) * up, down)


def linear(x: Tensor, product: ProductTensors) -> Tensor:
    y = torch.cat([F.linear(x, weight, bias) for weight, bias in product.base], -1)
    if not product.adapters:
        return y
    down, up = joint_matrices(product.adapters, x.dtype)
    return torch.addmm(y, x @ down, up)
