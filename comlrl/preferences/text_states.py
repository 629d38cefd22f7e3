"""Texts → the hidden state at each one's last token, without reading a beginning twice.

A reward model reads texts that begin alike: the siblings of a node, winner and loser of a pair.
They share a packed row, as completions of what they have in common.
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
SHARED = 0.25  # of a text, at least: what texts in one row have in common


def last_states(fast: FastDecoder, rows: Sequence[Row], pad_id: int, device: object) -> Tensor:
    """Return (texts, D), in the order of the rows' completions; padding is ignored."""
    batch = Packed(pack(rows, pad_id), torch.device(str(device)), fast.step, last_tokens=True)
    lengths = torch.tensor([len(ids) for row in rows for ids in row.completions])
    return fast.packed(batch, batch.token_A[lengths.cumsum(0) - 1])


def shared_rows(texts: Sequence[Ids]) -> list[Row]:
    """Return each text in a row with similar ones; texts have at least two tokens."""
    order = sorted(range(len(texts)), key=lambda i: texts[i])  # those that begin alike together
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
