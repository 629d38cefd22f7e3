"""The distinct tokens of packed rows: a common prefix of siblings is computed once.

A token's hidden state depends on its prompt and on the tokens before it, so the completions of a
row are a tree below their prompt's last token. Completions of trained policies are often the same.
A completion's last token predicts nothing, so its state is computed only on request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.types import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """The distinct tokens of packed rows: all prompts' in the rows' order, then the others.

    S: completions that are neither a copy nor a prefix of a sibling; they hold all the tokens.
    C: tokens of the longest. A completion's last token is among them if it is requested, or if a
    sibling continues after it.
    """

    count: int
    token_RL: Tensor  # index of each column's token; −1 in padding, and where none is computed
    path_SC: Tensor  # indices of a completion's tokens; 0 in padding
    lengths_S: Tensor
    row_S: Tensor

    @classmethod
    def from_batch(cls, batch: TokenBatch, last_tokens: bool) -> Trie:
        """Build a trie from sorted completions.

        The longest prefix that a completion shares with any before it, it shares with the previous
        one.
        """
        computed_RL = batch.segment_RL > 0
        if not last_tokens:
            computed_RL &= F.pad(batch.segment_RL[:, 1:], (0, 1), value=-1) == batch.segment_RL
        row_S, ids_SC, mask_SC = _completions(batch, computed_RL)
        keys, number = torch.cat([row_S[:, None], ids_SC], 1), torch.zeros(0, dtype=torch.long)
        if len(keys):
            keys, number = keys.unique(dim=0, return_inverse=True)
        real_SC = keys[:, 1:] >= 0
        same = (keys[1:] == keys[:-1]).long().cumprod(1)[:, 1:]  # 1 in the common prefix
        new_SC = real_SC & (F.pad(same, (0, 0, 1, 0))[: len(keys)] == 0)

        in_prompt_RL = batch.segment_RL == 0
        prompts = int(in_prompt_RL.sum())
        first = (new_SC.flatten().cumsum(0) - 1 + prompts).view_as(new_SC)
        token_SC = first.where(new_SC, 0).cummax(0).values.where(real_SC, 0)
        token_RL = torch.full_like(batch.segment_RL, -1)
        token_RL[in_prompt_RL] = torch.arange(prompts)
        token_RL[computed_RL] = token_SC[number][mask_SC]

        lengths_S = real_SC.sum(1)
        leaf = F.pad(same.sum(1), (0, 1))[: len(keys)] < lengths_S  # the next does not continue it
        count = prompts + int(new_SC.sum())
        return cls(
            count=count,
            token_RL=token_RL,
            path_SC=token_SC[leaf],
            lengths_S=lengths_S[leaf],
            row_S=keys[leaf, 0],
        )

    def by_rows(self) -> Trie:
        """Return the same tokens numbered row by row, each row's in pre-order of its tree."""
        real_RL = self.token_RL >= 0
        rows_RL = torch.arange(len(real_RL))[:, None].expand_as(real_RL)
        row_T = torch.zeros(self.count, dtype=torch.long)
        row_T[self.token_RL[real_RL]] = rows_RL[real_RL]
        place_T = row_T.argsort(stable=True).argsort()  # of rows alike, in the order they have
        token_RL = place_T[self.token_RL].where(real_RL, -1)
        return replace(self, token_RL=token_RL, path_SC=place_T[self.path_SC])


def _completions(batch: TokenBatch, computed_RL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, (S,), token ids, (S, C), with −1 in padding, and padding mask, (S, C).

    These are of the completions' computed tokens.
    """
    segment_RL = batch.segment_RL
    of_row = segment_RL + (int(segment_RL.max()) + 1) * torch.arange(len(segment_RL))[:, None]
    rows_RL = torch.arange(len(segment_RL))[:, None].expand_as(segment_RL)
    _, counts = of_row[computed_RL].unique_consecutive(return_counts=True)
    row_S = rows_RL[computed_RL][counts.cumsum(0) - counts]
    mask_SC = torch.arange(int(counts.max()) if len(counts) else 0) < counts[:, None]
    ids_SC = torch.full(mask_SC.shape, -1)
    ids_SC[mask_SC] = batch.token_ids_RL[computed_RL]
    return row_S, ids_SC, mask_SC
