"""Attention that knows the structure of packed rows: prompts among themselves, completions to
their prompt and themselves.

A mask over a packed row of a prompt of p tokens and G completions of c has (p + G c)² entries, of
which p² / 2 + G c (p + c / 2) are used. Here tokens are gathered into grids of queries and keys:
prompts, attended causally, and completions, whose keys follow those of their prompt. A token may
stand at several places, its gradient is the sum over them, and its answer is read at one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.attention import Seen, attend, wide
from comlrl.models.fast.trie import Trie
from comlrl.types import TokenBatch

SHAPE_STEP = 256  # tokens
FINE_STEP = 64  # of large weights, whose products of tokens that nobody reads take longer
LARGE_BYTES = 64 << 20  # of weights
WORTH_A_GRID = 0.15  # of what attention to completions computes, at least: saved by one more


def shape_step(device: torch.device, dtype: torch.dtype, weights: int) -> int:
    """What numbers of tokens are rounded up to: on a CPU, each new shape of a bfloat16 product is
    compiled first, which takes longer than many products. ``weights``: bytes of all."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return 1
    return SHAPE_STEP if weights < LARGE_BYTES else FINE_STEP


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


class Answers(torch.autograd.Function):
    """(places, W) → (rows, W), each row from one place; zeros for the last, which have none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, place_of_row: Tensor, row_of_place: Tensor, unread: Tensor, rows: int
    ) -> Tensor:
        ctx.save_for_backward(row_of_place, unread)
        out = x.new_empty(rows, x.shape[1])
        torch.index_select(x, 0, place_of_row, out=out[: len(place_of_row)])
        out[len(place_of_row) :] = 0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        row_of_place, unread = ctx.saved_tensors
        grad = grads[0].index_select(0, row_of_place)
        return grad.index_fill_(0, unread, 0), None, None, None, None


@dataclass(frozen=True, slots=True)
class Grid:
    """C queries of each of S texts to K keys: which tokens they are, and which are no padding."""

    query_SC: Tensor
    asks_SC: Tensor
    key_SK: Tensor
    known_SK: Tensor

    @classmethod
    def causal(cls, token_SL: Tensor, real_SL: Tensor) -> Grid:
        return cls(token_SL, real_SL, token_SL, real_SL)

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.query_SC.shape, self.key_SK.shape[1]

    def seen(self) -> Seen | None:
        """Keys up to oneself, of which the last are the queries' own. None: all are, and a text's
        padding comes after the queries, so that ``attend`` needs no mask."""
        if self.query_SC is self.key_SK:
            return None
        _, C, K = self.shape
        upto_CK = torch.ones(C, K, dtype=torch.bool).tril(K - C)
        return Seen((upto_CK & self.known_SK[:, None])[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Some grids, and which tokens' answers are read."""

    shapes: list[tuple[int, int, int]]
    seen: list[Seen | None]
    queries: Shown
    keys: Shown
    place_of_row: Tensor
    row_of_place: Tensor
    unread: Tensor
    rows: int

    @classmethod
    def of(cls, grids: Sequence[Grid], tokens: int, read: Tensor, rows: int) -> Questions:
        """``read``: tokens, which all stand in a grid; ``rows``: so many and some zeros."""
        token_of_place = torch.cat([grid.query_SC.flatten() for grid in grids])
        silent = torch.cat([~grid.asks_SC.flatten() for grid in grids])
        queries = Shown.of(token_of_place, tokens, silent)
        key = torch.cat([grid.key_SK.flatten() for grid in grids])
        empty = torch.cat([~grid.known_SK.flatten() for grid in grids])
        place_of_row = queries.places[queries.starts[read]]
        row_of_place = torch.zeros_like(token_of_place)
        row_of_place[place_of_row] = torch.arange(len(read))
        unread = torch.ones_like(silent)
        unread[place_of_row] = False
        return cls(
            shapes=[grid.shape for grid in grids],
            seen=[grid.seen() for grid in grids],
            queries=queries,
            keys=Shown.of(key, tokens, empty),
            place_of_row=place_of_row,
            row_of_place=row_of_place,
            unread=unread.nonzero()[:, 0],
            rows=rows,
        )

    def to(self, device: torch.device) -> Questions:
        return Questions(
            shapes=self.shapes,
            seen=[None if seen is None else seen.to(device) for seen in self.seen],
            queries=self.queries.to(device),
            keys=self.keys.to(device),
            place_of_row=self.place_of_row.to(device),
            row_of_place=self.row_of_place.to(device),
            unread=self.unread.to(device),
            rows=self.rows,
        )


class Packed:
    """A batch's distinct tokens, flat, and the grids in which prompts and completions attend: a
    token that siblings share once, at as many places as they are.

    T: tokens. P, L: prompts and the longest's tokens. A: actions, copies too.
    """

    def __init__(
        self, batch: TokenBatch, device: torch.device, step: int, last_tokens: bool = False
    ) -> None:
        """``step``: T is rounded up to a multiple of it, with tokens that nobody sees;
        ``last_tokens``: those of completions are read too, in whose states nothing is chosen."""
        self.device = device
        trie = Trie.of(batch, last_tokens)
        real = trie.token_RL >= 0
        tokens_T = torch.zeros(2, rounded(trie.count, step), dtype=torch.long)
        tokens_T[:, trie.token_RL[real]] = torch.stack(
            [batch.token_ids_RL[real], batch.positions_RL[real]]
        )
        self.ids_T, self.positions_T = tokens_T.to(device)
        row_A, column_A = batch.action_mask_RL.nonzero(as_tuple=True)
        previous_A = batch.previous_RL[row_A, column_A]
        self.token_A = trie.token_RL[row_A, column_A]  # what was chosen, or −1; on the CPU
        self.chooser_A = trie.token_RL[row_A, previous_A]  # in whose state; on the CPU
        self.targets_A = batch.token_ids_RL[row_A, column_A].to(device)

        lengths_P = (batch.segment_RL == 0).sum(1)
        starts_P = lengths_P.cumsum(0) - lengths_P
        column = torch.arange(int(lengths_P.max()))
        real_PL = column < lengths_P[:, None]
        token_PL = (starts_P[:, None] + column).where(real_PL, 0)
        self.prompts = Grid.causal(token_PL, real_PL)
        self.ends_P = starts_P + lengths_P - 1
        self.completions = []
        for S in _alike(trie.lengths_S, len(column)):
            width = int(trie.lengths_S[S].max())
            own_SC, real_SC = trie.path_SC[S, :width], torch.arange(width) < trie.lengths_S[S, None]
            of_S = trie.row_S[S]
            keys_SK = torch.cat([token_PL[of_S], own_SC], 1)
            known_SK = torch.cat([real_PL[of_S], real_SC], 1)
            self.completions.append(Grid(own_SC, real_SC, keys_SK, known_SK))
        grids = [self.prompts, *self.completions]
        all_tokens = Questions.of(grids, len(self.ids_T), torch.arange(trie.count), len(self.ids_T))
        self.all_tokens = all_tokens.to(device)

    def read(self, wanted_W: Tensor, rows: int) -> Questions:
        """The questions of a layer after which only these tokens (on the CPU) are needed: of
        prompts at most the last ones."""
        key_PL, known_PL = self.prompts.key_SK, self.prompts.known_SK
        of_prompts = wanted_W[wanted_W < known_PL.sum()]
        assert torch.isin(of_prompts, self.ends_P).all(), "inside prompts nothing is read"
        ends = self.ends_P[:, None]
        grids = [Grid(ends, torch.ones_like(ends).bool(), key_PL, known_PL), *self.completions]
        return Questions.of(grids, len(self.ids_T), wanted_W, rows).to(self.device)

    def attention(
        self,
        qkv_THW: Tensor,
        heads: int,
        kv_heads: int,
        scaling: float,
        asked: Questions,
        keep: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Tensor:
        """(T, heads + 2 kv_heads, width) → (rows, heads · width).

        ``keep`` is handed the prompts' keys and values, (P, kv_heads, L, width) each.
        """
        width = qkv_THW.shape[-1]
        query_THW, keys_THW = qkv_THW.split((heads, 2 * kv_heads), 1)
        queries = show(query_THW.flatten(1), asked.queries)
        keys = show(keys_THW.flatten(1), asked.keys)
        queries_of = queries.split([S * C for S, C, _ in asked.shapes])
        keys_of = keys.split([S * K for S, _, K in asked.shapes])
        outs: list[Tensor] = []
        for (S, C, K), seen, own, known in zip(
            asked.shapes, asked.seen, queries_of, keys_of, strict=True
        ):
            query = own.view(S, C, heads, width).transpose(1, 2)
            key, value = known.view(S, K, 2 * kv_heads, width).transpose(1, 2).split(kv_heads, 1)
            if not outs and keep is not None:
                keep(wide(key), wide(value))
            out = attend(query, key, value, seen, scaling)
            outs.append(out.transpose(1, 2).reshape(S * C, heads * width))
        return Answers.apply(
            torch.cat(outs), asked.place_of_row, asked.row_of_place, asked.unread, asked.rows
        )


def _alike(lengths_S: Tensor, before: int) -> list[Tensor]:
    """Completions in groups of like length, shorter ones first; one group where two would not
    save much of what attention computes. ``before``: tokens of the longest prompt."""
    if not len(lengths_S):
        return []
    lengths, order = lengths_S.sort(stable=True)
    size = torch.arange(1, len(lengths) + 1)
    each = lengths * (before + lengths)  # queries × keys of one that is padded to this length
    cost = size * each + (len(lengths) - size) * each[-1]  # split after each one
    at = int(cost.argmin())
    if cost[at] > (1 - WORTH_A_GRID) * cost[-1]:
        return [order]
    return [order[: at + 1], order[at + 1 :]]
