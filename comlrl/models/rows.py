"""Packing of completions into token rows, with a mask of the tokens that are actions.

The siblings of a node share a row: the prompt once, then each completion as a segment that sees
the prompt and itself, with positions that restart after the prompt. The last token of a completion
is an action, also if it is EOS; padding never is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from comlrl.types import Row, SamplingSupport, TokenBatch


def computed(row: Row) -> int:
    """Return the number of tokens that the fast decoder computes for a row.

    Common prefixes of siblings count once. The last tokens of completions do not count, because
    they predict nothing.
    """
    prefixes = sorted({ids[:-1] for ids in row.completions})  # neighbours have most in common
    common = sum(in_common(*pair) for pair in itertools.pairwise(prefixes))
    return len(row.prompt_ids) + sum(map(len, prefixes)) - common


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def common_beginning(rows: Sequence[Row]) -> int:
    """Return the length of the prompts' common prefix, which excludes any prompt's last token.

    It is 0 for fewer than two rows.
    """
    if len(rows) < 2:
        return 0
    first = rows[0].prompt_ids
    return min(min(in_common(first, row.prompt_ids), len(row.prompt_ids) - 1) for row in rows)


def row_groups(
    rows: Sequence[Row], max_tokens: int, shared: bool = False, common: int = 0
) -> Iterator[list[Row]]:
    """Yield groups of rows of similar length, with at most ``max_tokens`` padded tokens each.

    A group has at least one row. ``shared``: limit computed tokens instead, of which the
    ``common`` ones at the beginning of all prompts count once per group.
    """
    sized = [(computed(row) if shared else row.length, row) for row in rows]
    group: list[Row] = []
    total = each = 0
    for size, row in sorted(sized, key=lambda pair: -pair[0]):
        each = size - common if shared or not group else each  # padded to the group's first
        if group and total + each > max_tokens:
            yield group
            group, total, each = [], 0, size
        total += each if group else size
        group.append(row)
    if group:
        yield group


def unpacked(rows: Sequence[Row]) -> list[Row]:
    """Return rows of one completion each, for attention without custom masks."""
    return [row.part(at, at + 1) for row in rows for at in range(len(row.completions))]


def split_rows(rows: Sequence[Row], max_tokens: int, shared: bool = False) -> list[Row]:
    """Split rows above ``max_tokens``, down to one completion per row.

    ``shared``: limit computed tokens instead.
    """
    parts = []
    for row in rows:
        if shared and computed(row) <= max_tokens:
            parts.append(row)
            continue
        start, length = 0, len(row.prompt_ids)
        for at, ids in enumerate(row.completions):
            length += len(ids)
            if (
                at > start
                and (computed(row.part(start, at + 1)) if shared else length) > max_tokens
            ):
                parts.append(row.part(start, at))
                start, length = at, len(row.prompt_ids) + len(ids)
        parts.append(row.part(start, len(row.completions)))
    return parts


def pack(rows: Sequence[Row], pad_id: int) -> TokenBatch:
    """Pack rows into one batch, padded on the right to the longest."""
    shape = (len(rows), max(row.length for row in rows))
    token_ids = torch.full(shape, pad_id)
    positions = torch.zeros(shape, dtype=torch.long)
    segment = torch.full(shape, -1)
    previous = torch.zeros(shape, dtype=torch.long)
    weight = torch.zeros(shape, dtype=torch.float64)  # rounded where the loss is computed
    completion = torch.full(shape, -1)
    chosen = torch.zeros(shape, dtype=torch.bool)
    for r, row in enumerate(rows):
        start = len(row.prompt_ids)
        token_ids[r, :start] = torch.tensor(row.prompt_ids)
        positions[r, :start] = torch.arange(start)
        segment[r, :start] = 0
        at = start
        for s, ids in enumerate(row.completions):
            span = slice(at, at + len(ids))
            token_ids[r, span] = torch.tensor(ids)
            positions[r, span] = torch.arange(start, start + len(ids))
            segment[r, span] = s + 1
            previous[r, span] = torch.arange(at - 1, at + len(ids) - 1)
            previous[r, at] = start - 1  # a first token is chosen by the prompt's last one
            weight[r, span] = row.weights[s]
            completion[r, span] = row.indices[s]
            chosen[r, at + (row.contexts[s] if row.contexts else 0) : at + len(ids)] = True
            at += len(ids)
    return TokenBatch(
        token_ids_RL=token_ids,
        positions_RL=positions,
        segment_RL=segment,
        previous_RL=previous,
        action_mask_RL=chosen,
        weight_RL=weight,
        completion_RL=completion,
        support=_support(rows),
        importance_A=_importance(rows),
    )


def _importance(rows: Sequence[Row]) -> torch.Tensor | None:
    """Return π/μ of each chosen token's completion."""
    if not any(row.importances for row in rows):
        return None
    pairs = [
        pair
        for row in rows
        for pair in zip(row.importances or (1.0,) * len(row.completions), row.chosen, strict=True)
    ]
    importances, chosen = (torch.tensor(column) for column in zip(*pairs, strict=True))
    return importances.double().repeat_interleave(chosen)


def _support(rows: Sequence[Row]) -> SamplingSupport | None:
    """Return the truncation's support of all completions, in order."""
    parts = [support for row in rows for support in row.support]
    if not parts:
        return None
    assert len(parts) == sum(len(row.completions) for row in rows), "some sets are missing"
    return SamplingSupport(
        torch.cat([support.counts_L for support in parts]),
        torch.cat([support.ids_I for support in parts]),
        torch.cat([support.threshold_L for support in parts]),
    )


def attention_mask(segment_RL: torch.Tensor) -> torch.Tensor:
    """Return the mask, bool (R, 1, L, L): causal attention to the prompt and a token's segment.

    A padding position sees the row's first token, so that no row of the mask is empty.
    """
    query, key = segment_RL[:, :, None], segment_RL[:, None, :]
    length = segment_RL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_RL.device).tril()
    visible = ((key == 0) | (key == query)) & (key >= 0) & causal
    visible[:, :, 0] |= query[:, :, 0] < 0
    return visible[:, None]
