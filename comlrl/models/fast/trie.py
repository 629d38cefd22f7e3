"""What is computed for packed rows: common beginnings of siblings once, unread states never.

A token's hidden state depends on its prompt and on what stands before it, so the completions of a
row are a tree below their prompt's last token. Completions of trained
policies are often the same. In the state of a completion's last token nothing is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.types import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """The distinct tokens of packed rows: all prompts' in the rows' order, then the others.

    S: completions that are neither a copy nor a beginning of a sibling, which hold all the tokens;
    C: the longest's. A completion's last token is one of them where it is asked for, or stands in a
    sibling's middle.
    """

    count: int
    token_RL: Tensor  # which one stands at a place; −1 in padding, and where none is computed
    path_SC: Tensor  # those of a completion; 0 after its end
    lengths_S: Tensor
    row_S: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, last_tokens: bool) -> Trie:
        """Completions in lexicographic order: what one has in common with any before it, it has
        with the one just before it."""
        spoken_RL = batch.segment_RL > 0
        if not last_tokens:
            spoken_RL &= F.pad(batch.segment_RL[:, 1:], (0, 1), value=-1) == batch.segment_RL
        row_S, ids_SC, own_SC = _completions(batch, spoken_RL)
        keys, number = torch.cat([row_S[:, None], ids_SC], 1), torch.zeros(0, dtype=torch.long)
        if len(keys):
            keys, number = keys.unique(dim=0, return_inverse=True)
        real_SC = keys[:, 1:] >= 0
        same = (keys[1:] == keys[:-1]).long().cumprod(1)[:, 1:]  # 1 up to where they part
        new_SC = real_SC & (F.pad(same, (0, 0, 1, 0))[: len(keys)] == 0)

        in_prompt_RL = batch.segment_RL == 0
        prompts = int(in_prompt_RL.sum())
        first = (new_SC.flatten().cumsum(0) - 1 + prompts).view_as(new_SC)
        token_SC = first.where(new_SC, 0).cummax(0).values.where(real_SC, 0)
        token_RL = torch.full_like(batch.segment_RL, -1)
        token_RL[in_prompt_RL] = torch.arange(prompts)
        token_RL[spoken_RL] = token_SC[number][own_SC]

        lengths_S = real_SC.sum(1)
        whole = F.pad(same.sum(1), (0, 1))[: len(keys)] < lengths_S  # the next does not continue it
        count = prompts + int(new_SC.sum())
        return cls(
            count=count,
            token_RL=token_RL,
            path_SC=token_SC[whole],
            lengths_S=lengths_S[whole],
            row_S=keys[whole, 0],
        )


def _completions(batch: TokenBatch, spoken_RL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what is spoken, each one's row, (S,), and its tokens, (S, C), −1 after its end; and where
    these are."""
    segment_RL = batch.segment_RL
    of_row = segment_RL + (int(segment_RL.max()) + 1) * torch.arange(len(segment_RL))[:, None]
    rows_RL = torch.arange(len(segment_RL))[:, None].expand_as(segment_RL)
    _, counts = of_row[spoken_RL].unique_consecutive(return_counts=True)
    row_S = rows_RL[spoken_RL][counts.cumsum(0) - counts]
    own_SC = torch.arange(int(counts.max()) if len(counts) else 0) < counts[:, None]
    ids_SC = torch.full(own_SC.shape, -1)
    ids_SC[own_SC] = batch.token_ids_RL[spoken_RL]
    return row_S, ids_SC, own_SC
