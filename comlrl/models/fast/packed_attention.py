"""Attention that knows the structure of packed rows: prompts among themselves, completions to
their prompt and themselves.

A mask over a packed row of a prompt of p tokens and G completions of c has (p + G c)² entries, of
which p² / 2 + G c (p + c / 2) are used. Here prompts and completions lie in two grids, and the
first is attended causally, the second with the keys of its prompts in front of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.attention import Seen, attend, wide
from comlrl.models.fast.trie import Trie
from comlrl.types import TokenBatch

SHAPE_STEP = 256  # tokens
WORTH_A_GRID = 0.15  # of what attention to completions computes, at least: saved by one more


def shape_step(device: torch.device, dtype: torch.dtype) -> int:
    """What numbers of tokens are rounded up to: on a CPU, each new shape of a bfloat16 product is
    compiled first, which takes longer than many products."""
    return SHAPE_STEP if device.type == "cpu" and dtype == torch.bfloat16 else 1


def rounded(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class Shown:
    """Which row is shown at each of some places, and the places of each row."""

    rows: Tensor  # of each place
    places: Tensor  # a row's after the other's; those of padding are left out
    starts: Tensor  # of each row among them

    @classmethod
    def of(cls, rows: Tensor, count: int, padding: Tensor | None = None) -> Shown:
        """``rows``: of ``count``; ``padding``: places, bool, that show a row to nobody."""
        used = torch.arange(len(rows)) if padding is None else (~padding).nonzero()[:, 0]
        places = used[rows[used].argsort(stable=True)]
        counts = torch.bincount(rows[used], minlength=count)
        return cls(rows, places, counts.cumsum(0) - counts)

    def to(self, device: torch.device) -> Shown:
        return Shown(self.rows.to(device), self.places.to(device), self.starts.to(device))


class Show(torch.autograd.Function):
    """(T, W) → (places, W). A row's gradient is the sum over its places, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(places, starts)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        places, starts = ctx.saved_tensors
        return F.embedding_bag(places, grads[0], starts, mode="sum"), None, None, None


def show(x: Tensor, shown: Shown) -> Tensor:
    return Show.apply(x, shown.rows, shown.places, shown.starts)


class Flatten(torch.autograd.Function):
    """The way back: (slots, …) → (T, …), each token's first slot; zeros for tokens without one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token_of_slot: Tensor,
        slot_of_token: Tensor,
        unread: Tensor,
        tokens: int,
    ) -> Tensor:
        ctx.save_for_backward(token_of_slot, unread)
        out = x.new_empty(tokens, *x.shape[1:])
        torch.index_select(x, 0, slot_of_token, out=out[: len(slot_of_token)])
        out[len(slot_of_token) :] = 0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        token_of_slot, unread = ctx.saved_tensors
        grad = grads[0].index_select(0, token_of_slot)
        return grad.index_fill_(0, unread, 0), None, None, None, None


@dataclass(frozen=True, slots=True)
class Grid:
    """Completions of like length; K: L keys of the prompt, C of its own."""

    prompt_of_S: Tensor
    seen: Seen

    @classmethod
    def of(cls, prompt_of_S: Tensor, lengths_P: Tensor, width: int) -> Grid:
        seen_SL = (torch.arange(int(lengths_P.max())) < lengths_P[:, None])[prompt_of_S]
        causal_CC = torch.ones(width, width, dtype=torch.bool).tril()
        before = seen_SL[:, None, :].expand(-1, width, -1)
        own = causal_CC.expand(len(prompt_of_S), -1, -1)
        return cls(prompt_of_S, Seen(torch.cat([before, own], -1)[:, None]))

    def to(self, device: torch.device) -> Grid:
        return Grid(self.prompt_of_S.to(device), self.seen.to(device))


class Packed:
    """A batch's distinct tokens, flat, and where each stands in the grids of prompts and
    completions: a token that siblings share once, in as many slots as they are.

    T: tokens. P, L: prompts and the longest's tokens. A: actions, copies too.
    """

    def __init__(self, batch: TokenBatch, device: torch.device, step: int) -> None:
        """``step``: T is rounded up to a multiple of it, with tokens that nobody sees."""
        trie = Trie.of(batch)
        real = batch.segment_RL >= 0
        tokens_T = torch.zeros(2, rounded(trie.count, step), dtype=torch.long)
        tokens_T[:, trie.token_RL[real]] = torch.stack(
            [batch.token_ids_RL[real], batch.positions_RL[real]]
        )
        self.ids_T, self.positions_T = tokens_T.to(device)
        row_A, column_A = batch.action_mask_RL.nonzero(as_tuple=True)
        previous_A = batch.previous_RL[row_A, column_A]
        self.token_A = trie.token_RL[row_A, column_A]  # what was chosen; on the CPU
        self.chooser_A = trie.token_RL[row_A, previous_A]  # in whose state; on the CPU
        self.targets_A = batch.token_ids_RL[row_A, column_A].to(device)

        lengths_P = (batch.segment_RL == 0).sum(1)
        starts = lengths_P.cumsum(0) - lengths_P
        column = torch.arange(int(lengths_P.max()))
        self.shape_PL = len(lengths_P), len(column)
        padding = [column >= lengths_P[:, None]]
        slots = [(starts[:, None] + column).masked_fill(padding[0], 0)]
        self.grids = []
        for S in _alike(trie.lengths_S, len(column)):
            width = int(trie.lengths_S[S].max())
            self.grids.append(Grid.of(trie.row_S[S], lengths_P, width).to(device))
            slots.append(trie.path_SC[S, :width])
            padding.append(torch.arange(width) >= trie.lengths_S[S, None])
        token_of_slot = torch.cat([part.flatten() for part in slots])
        empty = torch.cat([part.flatten() for part in padding])
        shown = Shown.of(token_of_slot, len(self.ids_T), empty)
        slot_of_token = shown.places[shown.starts[: trie.count]]
        unread = torch.ones(len(token_of_slot), dtype=torch.bool)
        unread[slot_of_token] = False
        self.shown = shown.to(device)
        self.slot_of_token = slot_of_token.to(device)
        self.unread = unread.nonzero()[:, 0].to(device)

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
        slots = show(qkv_THW.flatten(1), self.shown)
        P, L = self.shape_PL
        split = (heads, kv_heads, kv_heads)
        prompts = slots[: P * L].view(P, L, -1, width).transpose(1, 2)
        query, key, value = prompts.split(split, 1)
        keep(wide(key), wide(value))
        out = attend(query, key, value, None, scaling)
        outs = [out.transpose(1, 2).reshape(P * L, heads * width)]
        end = P * L
        for grid in self.grids:
            S, _, C, _ = grid.seen.mask.shape
            start, end = end, end + S * C
            own = slots[start:end].view(S, C, -1, width).transpose(1, 2)
            before = prompts[:, heads:].index_select(0, grid.prompt_of_S)
            key, value = torch.cat([before, own[:, heads:]], 2).split(kv_heads, 1)
            out = attend(own[:, :heads], key, value, grid.seen, scaling)
            outs.append(out.transpose(1, 2).reshape(S * C, heads * width))
        flat = torch.cat(outs)
        tokens = len(qkv_THW)
        return Flatten.apply(flat, self.shown.rows, self.slot_of_token, self.unread, tokens)


def _alike(lengths_S: Tensor, before: int) -> list[Tensor]:
    """Completions in groups of like length, shorter ones first; one group where two would not
    save much of what attention computes. ``before``: tokens of the longest prompt."""
    if not len(lengths_S):
        return []
    lengths, order = lengths_S.sort(stable=True)
    size = torch.arange(1, len(lengths) + 1)
    each = lengths * (before + lengths)  # queries × keys of one that is padded to this length
    cost = size * each + (len(lengths) - size) * each[-1]  # split behind each one
    at = int(cost.argmin())
    if cost[at] > (1 - WORTH_A_GRID) * cost[-1]:
        return [order]
    return [order[: at + 1], order[at + 1 :]]
