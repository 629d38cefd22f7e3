"""Attention in packed rows: prompts see their common prefix and themselves, completions see their
prompt and themselves.

For a prompt of p tokens and G completions of c tokens, a mask has (p + G c)² entries, of which
p² / 2 + G c (p + c / 2) are used. Here tokens are gathered into grids of queries and keys: prompts,
with causal attention, and completions, whose keys follow those of their prompt. If an agent's
prompts share a prefix, it is a separate text, whose keys precede those of the prompts. A token may
fill several slots of the grids: its gradient is the sum over them; its output is read from one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.attention import AttentionMask, attend, wide
from comlrl.models.fast.tree_mask import TreePlan, subtree_ends
from comlrl.models.fast.trie import Trie
from comlrl.types import TokenBatch

SHAPE_STEP = 256  # tokens
FINE_STEP = 64  # with large weights, where padding tokens cost more
LARGE_BYTES = 64 << 20  # of weights
WORTH_A_GRID = 0.15  # minimum share of the completions' attention that a second grid must save


def shape_step(device: torch.device, dtype: torch.dtype, weights: int) -> int:
    """Return the multiple to which token counts are rounded up.

    A CPU compiles each new shape of a bfloat16 product, which takes longer than many products.
    ``weights``: total bytes of the model's weights.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return 1
    return SHAPE_STEP if weights < LARGE_BYTES else FINE_STEP


def rounded(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class Gather:
    """The row that fills each slot, and the slots of each row."""

    rows: Tensor  # row of each slot
    slots: Tensor  # sorted by their rows, without padding
    starts: Tensor  # index in ``slots`` of each row's first slot

    @classmethod
    def from_rows(cls, rows: Tensor, count: int, padding: Tensor | None = None) -> Gather:
        """Build from each slot's row.

        ``count``: number of rows; ``padding``: bool mask of slots without gradient.
        """
        used = torch.arange(len(rows)) if padding is None else (~padding).nonzero()[:, 0]
        slots = used[rows[used].argsort(stable=True)]
        counts = torch.bincount(rows[used], minlength=count)
        return cls(rows, slots, counts.cumsum(0) - counts)

    def to(self, device: torch.device) -> Gather:
        return Gather(self.rows.to(device), self.slots.to(device), self.starts.to(device))


class GatherRows(torch.autograd.Function):
    """Rows in slots: (T, W) → (slots, W). A row's gradient is the sum over its slots, in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(slots, starts)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        slots, starts = ctx.saved_tensors
        return F.embedding_bag(slots, grads[0], starts, mode="sum"), None, None, None


def gather(x: Tensor, index: Gather) -> Tensor:
    return GatherRows.apply(x, index.rows, index.slots, index.starts)


class ReadOutputs(torch.autograd.Function):
    """Rows read from one slot each: (slots, W) → (rows, W); the last rows, without slots, are 0."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, unread: Tensor, rows: int
    ) -> Tensor:
        ctx.save_for_backward(row_of_slot, unread)
        out = x.new_empty(rows, x.shape[1])
        torch.index_select(x, 0, slot_of_row, out=out[: len(slot_of_row)])
        out[len(slot_of_row) :] = 0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        row_of_slot, unread = ctx.saved_tensors
        grad = grads[0].index_select(0, row_of_slot)
        return grad.index_fill_(0, unread, 0), None, None, None, None


@dataclass(frozen=True, slots=True)
class Grid:
    """Tokens of C queries and K keys for each of S texts, and masks that are False in padding."""

    query_SC: Tensor
    query_mask_SC: Tensor
    key_SK: Tensor
    key_mask_SK: Tensor

    @classmethod
    def causal(cls, token_SL: Tensor, mask_SL: Tensor) -> Grid:
        return cls(token_SL, mask_SL, token_SL, mask_SL)

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.query_SC.shape, self.key_SK.shape[1]

    def mask(self) -> AttentionMask | None:
        """Return a causal mask, in which the queries are the last of the keys.

        Returns None if the queries are all of the keys: padding then follows every query, so
        ``attend`` needs no mask.
        """
        if self.query_SC is self.key_SK:
            return None
        _, C, K = self.shape
        causal_CK = torch.ones(C, K, dtype=torch.bool).tril(K - C)
        return AttentionMask((causal_CK & self.key_mask_SK[:, None])[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The grids of a layer: masks, indices of queries and keys, and which outputs are read."""

    shapes: list[tuple[int, int, int]]
    masks: list[AttentionMask | None]
    queries: Gather
    keys: Gather
    slot_of_row: Tensor
    row_of_slot: Tensor
    unread: Tensor
    rows: int

    @classmethod
    def from_grids(
        cls, grids: Sequence[Grid], tokens: int, read: Tensor, rows: int
    ) -> AttentionPlan:
        """Build a plan.

        ``read``: tokens whose outputs are read, each a query of a grid; ``rows``: number of rows of
        the result, which is padded with zeros.
        """
        token_of_slot = torch.cat([grid.query_SC.flatten() for grid in grids])
        padding = torch.cat([~grid.query_mask_SC.flatten() for grid in grids])
        queries = Gather.from_rows(token_of_slot, tokens, padding)
        key = torch.cat([grid.key_SK.flatten() for grid in grids])
        key_padding = torch.cat([~grid.key_mask_SK.flatten() for grid in grids])
        slot_of_row = queries.slots[queries.starts[read]]
        row_of_slot = torch.zeros_like(token_of_slot)
        row_of_slot[slot_of_row] = torch.arange(len(read))
        unread = torch.ones_like(padding)
        unread[slot_of_row] = False
        return cls(
            shapes=[grid.shape for grid in grids],
            masks=[grid.mask() for grid in grids],
            queries=queries,
            keys=Gather.from_rows(key, tokens, key_padding),
            slot_of_row=slot_of_row,
            row_of_slot=row_of_slot,
            unread=unread.nonzero()[:, 0],
            rows=rows,
        )

    def to(self, device: torch.device) -> AttentionPlan:
        return AttentionPlan(
            shapes=self.shapes,
            masks=[None if mask is None else mask.to(device) for mask in self.masks],
            queries=self.queries.to(device),
            keys=self.keys.to(device),
            slot_of_row=self.slot_of_row.to(device),
            row_of_slot=self.row_of_slot.to(device),
            unread=self.unread.to(device),
            rows=self.rows,
        )

    def attention(
        self,
        qkv_THW: Tensor,
        heads: int,
        kv_heads: int,
        scaling: float,
        keep: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Tensor:
        """Return attention: (T, heads + 2 kv_heads, width) → (rows, heads · width).

        ``keep`` is called with the prompts' keys and values, (P, kv_heads, L, width) each.
        """
        width = qkv_THW.shape[-1]
        query_THW, keys_THW = qkv_THW.split((heads, 2 * kv_heads), 1)
        queries = gather(query_THW.flatten(1), self.queries)
        keys = gather(keys_THW.flatten(1), self.keys)
        queries_of = queries.split([S * C for S, C, _ in self.shapes])
        keys_of = keys.split([S * K for S, _, K in self.shapes])
        outs: list[Tensor] = []
        for (S, C, K), mask, own_queries, own_keys in zip(
            self.shapes, self.masks, queries_of, keys_of, strict=True
        ):
            query = own_queries.view(S, C, heads, width).transpose(1, 2)
            key, value = own_keys.view(S, K, 2 * kv_heads, width).transpose(1, 2).split(kv_heads, 1)
            if not outs and keep is not None:
                keep(wide(key), wide(value))
            out = attend(query, key, value, mask, scaling)
            outs.append(out.transpose(1, 2).reshape(S * C, heads * width))
        return ReadOutputs.apply(
            torch.cat(outs), self.slot_of_row, self.row_of_slot, self.unread, self.rows
        )


class Packed:
    """A batch's distinct tokens, flat, and the plan of their attention.

    Attention uses one mask, or grids of prompts and completions, in which a token that siblings
    share fills a slot for each of them.

    T: tokens. P: prompts. L: tokens of the longest prompt. A: actions, including duplicates.
    """

    all_tokens: AttentionPlan | TreePlan  # for layers whose outputs are all needed

    def __init__(
        self,
        batch: TokenBatch,
        device: torch.device,
        step: int,
        last_tokens: bool = False,
        tree: bool = False,
        agent_R: Tensor | None = None,
    ) -> None:
        """Pack a batch.

        ``step``: pad T to a multiple of it, with tokens that no other token sees; ``last_tokens``:
        also compute the completions' last tokens, which predict nothing; ``tree``: use one mask,
        with tokens ordered row by row; ``agent_R``: the agent of each row, if there are several
        (``CommonBeginning.from_batch``).
        """
        self.device = device
        trie = Trie.from_batch(batch, last_tokens, agent_R)
        if tree:
            trie = trie.by_rows()
        real = trie.token_RL >= 0
        tokens_T = torch.zeros(2, rounded(trie.count, step), dtype=torch.long)
        tokens_T[:, trie.token_RL[real]] = torch.stack(
            [batch.token_ids_RL[real], batch.positions_RL[real]]
        )
        self.ids_T, self.positions_T = tokens_T.to(device)
        self.token_RL = trie.token_RL  # on the CPU
        row_A, column_A = batch.action_mask_RL.nonzero(as_tuple=True)
        previous_A = batch.previous_RL[row_A, column_A]
        self.token_A = trie.token_RL[row_A, column_A]  # −1 if not computed; on the CPU
        self.predictor_A = trie.token_RL[row_A, previous_A]  # predicts the action; on the CPU
        self.targets_A = batch.token_ids_RL[row_A, column_A].to(device)

        if tree:
            ends = torch.tensor(subtree_ends(tokens_T[1].tolist()))
            self.all_tokens = TreePlan(ends.to(device))
            return
        common, first_P = trie.common.length, trie.common.first_R
        lengths_P = (batch.segment_RL == 0).sum(1)
        mask_PL = torch.arange(int(lengths_P.max())) < lengths_P[:, None]
        token_PL = trie.token_RL[:, : mask_PL.shape[1]].where(mask_PL, 0)
        self.ends_P = token_PL[torch.arange(len(lengths_P)), lengths_P - 1]
        self.prompt_tokens = trie.prompt_tokens
        shared_P = common * (first_P != torch.arange(len(first_P)))
        self.tokens_P = lengths_P - shared_P  # of each prompt, without those of an earlier prompt
        beginnings = []
        self.prompts = Grid.causal(token_PL, mask_PL)
        if common:
            first = first_P.unique()
            beginnings = [Grid.causal(token_PL[first, :common], mask_PL[first, :common])]
            self.prompts = Grid(token_PL[:, common:], mask_PL[:, common:], token_PL, mask_PL)
        self.completions = []
        for S in length_groups(trie.lengths_S, mask_PL.shape[1]):
            width = int(trie.lengths_S[S].max())
            query_SC, prompt_S = trie.path_SC[S, :width], trie.row_S[S]
            mask_SC = torch.arange(width) < trie.lengths_S[S, None]
            key_SK = torch.cat([token_PL[prompt_S], query_SC], 1)
            mask_SK = torch.cat([mask_PL[prompt_S], mask_SC], 1)
            self.completions.append(Grid(query_SC, mask_SC, key_SK, mask_SK))
        grids = [self.prompts, *self.completions, *beginnings]
        all_tokens = AttentionPlan.from_grids(
            grids, len(self.ids_T), torch.arange(trie.count), len(self.ids_T)
        )
        self.all_tokens = all_tokens.to(device)

    def read(self, wanted_W: Tensor, rows: int) -> AttentionPlan | TreePlan:
        """Return the plan of a layer after which only the tokens ``wanted_W`` (on the CPU) matter.

        With grids, the last token is the only one of a prompt that may be wanted.
        """
        if isinstance(self.all_tokens, TreePlan):
            query_Q = F.pad(wanted_W, (0, rows - len(wanted_W)))
            return TreePlan(self.all_tokens.end_T, query_Q.to(self.device))
        key_PL, mask_PL = self.prompts.key_SK, self.prompts.key_mask_SK
        of_prompts = wanted_W[wanted_W < self.prompt_tokens]
        assert torch.isin(of_prompts, self.ends_P).all(), "inside prompts nothing is read"
        ends = self.ends_P[:, None]
        grids = [Grid(ends, torch.ones_like(ends).bool(), key_PL, mask_PL), *self.completions]
        return AttentionPlan.from_grids(grids, len(self.ids_T), wanted_W, rows).to(self.device)


def length_groups(lengths_S: Tensor, before: int) -> list[Tensor]:
    """Divide completions by length into at most two groups, shorter ones first.

    There is one group if two would save little of the work in attention. ``before``: tokens of the
    longest prompt.
    """
    if not len(lengths_S):
        return []
    lengths, order = lengths_S.sort(stable=True)
    size = torch.arange(1, len(lengths) + 1)
    each = lengths * (before + lengths)  # queries × keys of a completion padded to this length
    cost = size * each + (len(lengths) - size) * each[-1]  # of a split after each one
    at = int(cost.argmin())
    if cost[at] > (1 - WORTH_A_GRID) * cost[-1]:
        return [order]
    return [order[: at + 1], order[at + 1 :]]
