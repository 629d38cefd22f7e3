"""Norms, rotations and gates as single autograd nodes that save little for the backward pass.

Without gradients they are plain functions, because a graph node costs as much as a small operation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return w · x / rms(x) of (T, …, D), rounded as in transformers; w is (D,), or (…, D).

    On a GPU, torch's fused kernel handles w of (D,); it rounds once, after the product with w.
    """
    if x.is_cuda and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    if torch.is_grad_enabled():
        return RMSNorm.apply(x, weight, eps)
    return _normed(x, weight, eps)[0]


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y, and 1 / rms(x)."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=torch.empty_like(x)).mul_(weight), scale


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = (grad * torch.mul(x, scale).to(x.dtype)).sum(0)
        grad = grad * weight
        # dx = s g − s³ x (g·x) / D
        along = torch.linalg.vecdot(grad, x)[..., None] * scale**3 / -x.shape[-1]
        return torch.mul(grad, scale).addcmul_(x, along).to(x.dtype), for_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Apply rotary embedding to the first ``heads`` heads of (T, all heads, width)."""
    if torch.is_grad_enabled():
        return Rotate.apply(x, cos, sin, heads)
    return _rotated(x, cos, sin, heads)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _rotated(x, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin, ctx.heads), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate x; ``sin`` is negated in the first half, so rolling replaces ``rotate_half``."""
    out = torch.empty_like(x)
    part, turned = x[:, :heads], out[:, :heads]
    torch.mul(part, cos, out=turned)
    turned.addcmul_(part.roll(part.shape[-1] // 2, -1), sin)
    out[:, heads:] = x[:, heads:]
    return out


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate) · up of (T, [gate, up])."""
    return SwiGLU.apply(both) if torch.is_grad_enabled() else _gated(both)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate).mul_(up)


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up, recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return _gated(both)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        for_gate, for_up = out.chunk(2, -1)
        torch.mul(grads[0], F.silu(gate), out=for_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=for_gate)
        return out
