"""The distinct tokens of packed rows: a common prefix is computed once.

A token's hidden state depends only on itself and the tokens before it, so the completions of a row
form a tree below their prompt's last token. Completions of trained policies are often equal.
Prompts of one agent share a prefix: a system message, instructions or worked examples.
A completion's last token predicts nothing, so its state is computed only on request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.types import TokenBatch

WORTH_SHARING = 1 / 16  # minimum share of the prompts' tokens that a common prefix must save


@dataclass(frozen=True, slots=True)
class CommonBeginning:
    """The common prefix of each agent's prompts, of the same length for all agents.

    R: rows. The prefix is computed in the first of an agent's rows.
    """

    length: int
    first_R: Tensor  # the first row of each row's agent

    @classmethod
    def from_batch(cls, batch: TokenBatch, agent_R: Tensor | None = None) -> CommonBeginning:
        """Compare each prompt with the first one of its agent.

        ``agent_R``: the agent of each row, with an agent's rows adjacent; None: there is one agent.
        A prompt's last token is never shared. The length is 0 if sharing would save little.
        """
        count = len(batch.segment_RL)
        rows_R = torch.arange(count)
        if agent_R is None:
            agent_R = torch.zeros_like(rows_R)
        _, number_R, rows = torch.unique_consecutive(
            agent_R, return_inverse=True, return_counts=True
        )
        first_R = (rows.cumsum(0) - rows)[number_R]
        in_prompt_RL = batch.segment_RL == 0
        ids_RL = batch.token_ids_RL.where(in_prompt_RL, -1)
        same_RL = (ids_RL == ids_RL[first_R]) & in_prompt_RL
        lengths_R = in_prompt_RL.sum(1)
        length = int(same_RL.long().cumprod(1).sum(1).minimum(lengths_R - 1).min())
        saved = length * (count - len(rows))
        if saved < WORTH_SHARING * int(lengths_R.sum()):
            length = 0
        return cls(length, first_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """The distinct tokens of packed rows: those of prompts in row order, then those of completions.

    A common prefix of prompts belongs to the first of its rows.

    S: completions that are neither a copy nor a prefix of a sibling; they contain all the tokens.
    C: tokens of the longest. A completion's last token is included if it is requested, or if a
    sibling continues after it.
    """

    count: int
    prompt_tokens: int
    common: CommonBeginning
    token_RL: Tensor  # index of each column's token; −1 in padding, and where none is computed
    path_SC: Tensor  # indices of a completion's tokens; 0 in padding
    lengths_S: Tensor
    row_S: Tensor

    @classmethod
    def from_batch(
        cls, batch: TokenBatch, last_tokens: bool, agent_R: Tensor | None = None
    ) -> Trie:
        """Build a trie by sorting the completions.

        In sorted order, no earlier completion shares a longer prefix with a completion than its
        predecessor does. ``agent_R``: as in ``CommonBeginning.from_batch``.
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

        common = CommonBeginning.from_batch(batch, agent_R)
        prompt_RL = batch.segment_RL == 0
        rows, columns = prompt_RL.shape
        shared_RL = torch.arange(columns) < common.length
        shared_RL = shared_RL & (common.first_R != torch.arange(rows))[:, None]
        prompts = int((prompt_RL & ~shared_RL).sum())
        first = (new_SC.flatten().cumsum(0) - 1 + prompts).view_as(new_SC)
        token_SC = first.where(new_SC, 0).cummax(0).values.where(real_SC, 0)
        token_RL = torch.full_like(batch.segment_RL, -1)
        token_RL[prompt_RL & ~shared_RL] = torch.arange(prompts)
        token_RL = token_RL[common.first_R].where(shared_RL, token_RL)
        token_RL[computed_RL] = token_SC[number][mask_SC]

        lengths_S = real_SC.sum(1)
        leaf = F.pad(same.sum(1), (0, 1))[: len(keys)] < lengths_S  # the next does not continue it
        count = prompts + int(new_SC.sum())
        return cls(
            count=count,
            prompt_tokens=prompts,
            common=common,
            token_RL=token_RL,
            path_SC=token_SC[leaf],
            lengths_S=lengths_S[leaf],
            row_S=keys[leaf, 0],
        )

    def by_rows(self) -> Trie:
        """Return the same tokens numbered row by row, each row's in pre-order of its tree."""
        real_RL = self.token_RL >= 0
        rows_RL = torch.arange(len(real_RL))[:, None].expand_as(real_RL)
        row_T = torch.full((self.count,), len(real_RL))
        row_T = row_T.scatter_reduce(0, self.token_RL[real_RL], rows_RL[real_RL], "amin")
        place_T = row_T.argsort(stable=True).argsort()  # tokens of a row keep their order
        token_RL = place_T[self.token_RL].where(real_RL, -1)
        return replace(self, token_RL=token_RL, path_SC=place_T[self.path_SC])


def _completions(batch: TokenBatch, computed_RL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the completions' computed tokens: rows, (S,), ids, (S, C), −1 in padding, and mask."""
    segment_RL = batch.segment_RL
    of_row = segment_RL + (int(segment_RL.max()) + 1) * torch.arange(len(segment_RL))[:, None]
    rows_RL = torch.arange(len(segment_RL))[:, None].expand_as(segment_RL)
    _, counts = of_row[computed_RL].unique_consecutive(return_counts=True)
    row_S = rows_RL[computed_RL][counts.cumsum(0) - counts]
    mask_SC = torch.arange(int(counts.max()) if len(counts) else 0) < counts[:, None]
    ids_SC = torch.full(mask_SC.shape, -1)
    ids_SC[mask_SC] = batch.token_ids_RL[computed_RL]
    return row_S, ids_SC, mask_SC
