"""A layer of the update as two functions of tensors, before and after attention, for torch.compile.

They are the same for all layers and agents, whose adapters are arguments, so that each is compiled
once for a number of tokens, which is a multiple of ``TOKEN_STEP``.
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
    """Call a function compiled.

    Activations always require gradients, so that one graph also serves the first layer and passes
    without gradients, whose log-probabilities then are those of the update to the bit.
    """
    inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in activations]
    with torch.enable_grad():
        y = compiled(function)(*inputs, *others)
    return y if torch.is_grad_enabled() else y.detach()


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)  # for batches of so many shapes
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

    ``head_norms``: of queries and of keys, or none; ``heads``: of queries, keys and values.
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
