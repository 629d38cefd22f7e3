"""Attention in packed rows by one mask: a token sees itself and its ancestors in a tree.

The prompt and completions of a row form a tree. Tokens are ordered row by row, and within a row in
pre-order. The descendants of a token then directly follow it, so that one vector encodes the tree:
``visible(q, k) = k ≤ q < end[k]``. On a GPU, FlexAttention applies the mask and skips empty blocks;
elsewhere, where it has no backward pass, the mask is dense.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comlrl.models.fast.attention import AttentionMask, attend

BLOCK = 128  # tokens of a block of FlexAttention


def subtree_ends(depths: Sequence[int]) -> list[int]:
    """Return, for each token in pre-order, the index after its last descendant."""
    ends, open_tokens = [len(depths)] * len(depths), list[int]()
    for token, depth in enumerate(depths):
        while open_tokens and depths[open_tokens[-1]] >= depth:
            ends[open_tokens.pop()] = token
        open_tokens.append(token)
    return ends


@dataclass(frozen=True, eq=False)
class TreePlan:
    """The attention of a layer whose outputs are needed for some tokens, or for all."""

    end_T: Tensor
    query_Q: Tensor | None = None  # None: all tokens

    def visible(self) -> Tensor:
        """Return which tokens each query sees, bool (Q, T)."""
        key_T = torch.arange(len(self.end_T), device=self.end_T.device)
        query_Q1 = (key_T if self.query_Q is None else self.query_Q)[:, None]
        return (key_T <= query_Q1) & (query_Q1 < self.end_T)

    @functools.cached_property
    def dense(self) -> AttentionMask:
        return AttentionMask(self.visible()[None, None])

    @functools.cached_property
    def blocks(self) -> Any:
        """The mask in the format of FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        end_T, query_Q = self.end_T, self.query_Q

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            token = query if query_Q is None else query_Q[query]
            return (key <= token) & (token < end_T[key])

        count = len(end_T) if query_Q is None else len(query_Q)
        return create_block_mask(mask, None, None, count, len(end_T), device=end_T.device)

    def attention(
        self,
        qkv_THW: Tensor,
        heads: int,
        kv_heads: int,
        scaling: float,
        keep: Callable[[Tensor, Tensor], object] | None = None,
    ) -> Tensor:
        """Return attention: (T, heads + 2 kv_heads, width) → (Q, heads · width)."""
        assert keep is None, "prompts to be continued are read in grids"
        query, key, value = (
            x.transpose(0, 1)[None] for x in qkv_THW.split((heads, kv_heads, kv_heads), 1)
        )
        if self.query_Q is not None:
            query = query.index_select(2, self.query_Q)
        if qkv_THW.is_cuda:
            grouped = heads != kv_heads
            out = flex()(
                query, key, value, block_mask=self.blocks, scale=scaling, enable_gqa=grouped
            )
        else:
            out = attend(query, key, value, self.dense, scaling)
        return out[0].transpose(0, 1).flatten(1)


@functools.cache
def flex() -> Any:
    """Return compiled FlexAttention; uncompiled, it would compute all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
