"""Attention that knows the structure of packed rows: prompts among themselves, completions to
their prompt and themselves.

A mask over a packed row of a prompt of p tokens and G completions of c has (p + G c)² entries, of
which p² / 2 + G c (p + c / 2) are used. Here prompts and completions lie in two grids, and the
first is attended causally, the second with the keys of its prompts in front of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.types import TokenBatch

SHAPE_STEP = 256  # tokens


def shape_step(device: torch.device, dtype: torch.dtype) -> int:
    """What numbers of tokens are rounded up to: on a CPU, each new shape of a bfloat16 product is
    compiled first, which takes longer than many products."""
    return SHAPE_STEP if device.type == "cpu" and dtype == torch.bfloat16 else 1


def rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def wide(x: Tensor) -> Tensor:
    """What attention computes in: float32 on a CPU, whose kernels for bfloat16 are slower, in the
    backward pass several times, and compile for every new length."""
    return x.float() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x


class Arrange(torch.autograd.Function):
    """(T, …) tokens → (slots, …). Padding slots show some token, and have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        ctx.tokens = len(x)
        return x.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (slot_of_token,) = ctx.saved_tensors
        return _filled(grads[0], slot_of_token, ctx.tokens), None, None


class Flatten(torch.autograd.Function):
    """The way back: (slots, …) → (T, …), zeros for tokens without a slot."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token_of_slot: Tensor,
        slot_of_token: Tensor,
        padding: Tensor,
        tokens: int,
    ) -> Tensor:
        ctx.save_for_backward(token_of_slot, padding)
        return _filled(x, slot_of_token, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        token_of_slot, padding = ctx.saved_tensors
        grad = grads[0].index_select(0, token_of_slot)
        return grad.index_fill_(0, padding, 0), None, None, None, None


def _filled(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """These rows of x, and zeros up to ``count``."""
    out = x.new_empty(count, *x.shape[1:])
    torch.index_select(x, 0, rows, out=out[: len(rows)])
    out[len(rows) :] = 0
    return out


class Packed:
    """A batch's tokens, flat, and where each stands in the grids of prompts and completions.

    T: tokens without padding. P, L: prompts and the longest's tokens. S, C: completions and the
    longest's tokens. A: actions.
    """

    def __init__(self, batch: TokenBatch, device: torch.device, step: int) -> None:
        """``step``: T is rounded up to a multiple of it, with tokens that nobody sees."""
        segment_RL = batch.segment_RL
        real = segment_RL >= 0
        count = int(real.sum())
        more = rounded(count, step) - count
        self.ids_T = F.pad(batch.token_ids_RL[real], (0, more)).to(device)
        self.positions_T = F.pad(batch.positions_RL[real], (0, more)).to(device)
        flat_RL = (real.flatten().cumsum(0) - 1).view(real.shape)
        row_A, column_A = batch.action_mask_RL.nonzero(as_tuple=True)
        self.chooser_A = flat_RL[row_A, batch.previous_RL[row_A, column_A]].to(device)
        self.targets_A = batch.token_ids_RL[row_A, column_A].to(device)

        rows, segments = len(segment_RL), int(segment_RL.max()) + 1
        group_RL = segment_RL + segments * torch.arange(rows)[:, None]
        counts = torch.bincount(group_RL[real], minlength=rows * segments)
        starts = counts.cumsum(0) - counts
        prompt = torch.arange(rows) * segments
        is_completion = torch.arange(len(counts)) % segments > 0
        completion = ((counts > 0) & is_completion).nonzero()[:, 0]
        self.shape_PL = rows, int(counts[prompt].max())
        self.shape_SC = len(completion), int(counts[completion].max()) if len(completion) else 0
        grids = [
            _grid(starts[prompt], counts[prompt], self.shape_PL[1]),
            _grid(starts[completion], counts[completion], self.shape_SC[1]),
        ]
        token_of_slot = torch.cat([tokens.flatten() for tokens, _ in grids])
        padding = torch.cat([empty.flatten() for _, empty in grids])
        slot_of_token = torch.empty(count, dtype=torch.long)
        used = (~padding).nonzero()[:, 0]
        slot_of_token[token_of_slot[used]] = used
        self.token_of_slot = token_of_slot.to(device)
        self.slot_of_token = slot_of_token.to(device)
        self.padding = padding.nonzero()[:, 0].to(device)
        self.prompt_of_S = (completion // segments).to(device)
        seen_SL = ~grids[0][1][completion // segments]
        width = self.shape_SC[1]
        causal_CC = torch.ones(width, width, dtype=torch.bool).tril()
        self.mask_SCK = torch.cat(
            [
                seen_SL[:, None, :].expand(-1, width, -1),
                causal_CC.expand(len(completion), -1, -1),
            ],
            dim=-1,
        ).to(device)[:, None]  # fmt: skip

    def attention(
        self,
        qkv_THW: Tensor,
        heads: int,
        kv_heads: int,
        scaling: float,
        keep: Callable[[Tensor, Tensor], object] = lambda key, value: None,
    ) -> Tensor:
        """(T, heads + 2 kv_heads, width) → (T, heads · width).

        ``keep`` is handed the prompts' keys and values, (P, kv_heads, L, width) each.
        """
        width = qkv_THW.shape[-1]
        slots = Arrange.apply(qkv_THW.flatten(1), self.token_of_slot, self.slot_of_token)
        slots = wide(slots)
        (P, L), (S, C) = self.shape_PL, self.shape_SC
        split = (heads, kv_heads, kv_heads)
        prompts = slots[: P * L].view(P, L, -1, width).transpose(1, 2)
        query, key, value = prompts.split(split, 1)
        keep(key, value)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )
        outs = [out.transpose(1, 2).reshape(P * L, heads * width)]
        if S:
            own = slots[P * L :].view(S, C, -1, width).transpose(1, 2)
            before = prompts[:, heads:].index_select(0, self.prompt_of_S)
            query = own[:, :heads]
            key, value = torch.cat([before, own[:, heads:]], 2).split(kv_heads, 1)
            out = F.scaled_dot_product_attention(
                query, key, value, self.mask_SCK, scale=scaling, enable_gqa=heads != kv_heads
            )
            outs.append(out.transpose(1, 2).reshape(S * C, heads * width))
        flat = torch.cat(outs).to(qkv_THW.dtype)
        return Flatten.apply(
            flat, self.token_of_slot, self.slot_of_token, self.padding, len(qkv_THW)
        )


def _grid(starts: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Token in each slot (token 0 in empty ones), and which slots are empty; both (n, width)."""
    column = torch.arange(width)
    empty = column >= counts[:, None]
    return (starts[:, None] + column).masked_fill(empty, 0), empty
