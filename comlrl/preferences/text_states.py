"""Computes the hidden state at the last token of each text, and common prefixes only once.

A reward model's texts often share a prefix: siblings of a node, or winner and loser of a pair. Such
texts share a packed row, as completions of their common prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comlrl.models.fast.decoder import FastDecoder
from comlrl.models.fast.packed_attention import Packed
from comlrl.models.rows import in_common, pack
from comlrl.types import Row

Ids = list[int]
SHARED = 0.25  # least share of a text that must be in the common prefix of its row


def last_states(fast: FastDecoder, rows: Sequence[Row], pad_id: int, device: object) -> Tensor:
    """Return the last tokens' states in the order of the rows' completions; shape (texts, D)."""
    batch = Packed(pack(rows, pad_id), torch.device(str(device)), fast.step, last_tokens=True)
    lengths = torch.tensor([len(ids) for row in rows for ids in row.completions])
    return fast.packed(batch, batch.token_A[lengths.cumsum(0) - 1])


def shared_rows(texts: Sequence[Ids]) -> list[Row]:
    """Pack texts, of at least two tokens each, into rows of texts that share a prefix."""
    order = sorted(range(len(texts)), key=lambda i: texts[i])  # neighbours share prefixes
    rows: list[Row] = []
    group: list[int] = []
    common: Ids = []
    for index in order:
        text = texts[index]
        shared = text[: min(in_common(common, text), len(text) - 1)] if group else text[:-1]
        if group and len(shared) < SHARED * len(text):
            rows.append(_row(texts, group, common))
            group, shared = [], text[:-1]
        group.append(index)
        common = shared
    if group:
        rows.append(_row(texts, group, common))
    return rows


def _row(texts: Sequence[Ids], group: Sequence[int], common: Ids) -> Row:
    start = len(common)
    completions = tuple(tuple(texts[i][start:]) for i in group)
    return Row(tuple(common), completions, (0.0,) * len(group), tuple(group))
