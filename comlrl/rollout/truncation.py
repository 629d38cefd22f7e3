"""Top-k and top-p truncation, and a record of the tokens that remain, for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comlrl.types import Sampling, SamplingSupport

# Numbers of likeliest tokens that are tried before the whole vocabulary is sorted. The largest 32
# of 1,216 take a tenth of the time of a sort, the largest 256 of 49,152 a twentieth, and they
# nearly always suffice.
PREFIXES = (32, 256, 4096)
PART = 8  # try prefixes of at most 1 / PART of the vocabulary


def truncated(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero what top-k and top-p (the smallest set of at least that mass) leave out."""
    if sampling.top_k is not None and sampling.top_k < probabilities.shape[-1]:
        least = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    return probabilities


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but each row's smallest set of at least ``top_p`` of its mass.

    ``probabilities``: (rows, vocabulary), not necessarily normalized. The whole vocabulary is
    sorted only for the rows that its likeliest tokens do not settle.
    """
    vocabulary = probabilities.shape[-1]
    total = probabilities.sum(-1, keepdim=True)
    left: torch.Tensor | None = None
    rows: Any = slice(None)  # that are not settled
    for width in (width for width in PREFIXES if PART * width <= vocabulary):
        truncated, settled = _nucleus_of(
            *probabilities[rows].topk(width, dim=-1), vocabulary, top_p, total[rows]
        )
        if left is None:  # usually sufficient, without a copy
            left, rows = truncated, (~settled).nonzero()[:, 0]
        else:
            left[rows] = truncated
            rows = rows[~settled]
        if not len(rows):
            return left
    ordered, index = probabilities[rows].sort(dim=-1, descending=True)
    truncated, _ = _nucleus_of(ordered, index, vocabulary, top_p, ordered.sum(-1, keepdim=True))
    if left is None:
        return truncated
    left[rows] = truncated
    return left


def _nucleus_of(
    ordered: torch.Tensor,
    index: torch.Tensor,
    vocabulary: int,
    top_p: float,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's nucleus, (rows, vocabulary), and whether it is complete.

    It is searched among the likeliest tokens. ``total``: the mass of each row, (rows, 1).
    """
    before = ordered.cumsum(-1) - ordered
    inside = before < top_p * total
    settled = ordered.sum(-1) >= top_p * total[:, 0]
    left = torch.zeros(len(ordered), vocabulary, dtype=ordered.dtype, device=ordered.device)
    return left.scatter_(-1, index, ordered.where(inside, 0.0)), settled


class Survivors:
    """Sampling support of a batch in decoding: sets of at most ``limit`` tokens, or thresholds."""

    def __init__(self, rows: int, steps: int, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.counts = torch.zeros(rows, steps, dtype=torch.int32, device=device)
        self.threshold = torch.full((rows, steps), torch.inf, device=device)
        self.rows: list[torch.Tensor] = []  # of each id
        self.ids: list[torch.Tensor] = []

    def note(
        self, probabilities: torch.Tensor, left: torch.Tensor, rows: torch.Tensor, step: int
    ) -> None:
        """Record the support of a step.

        ``probabilities``, ``left``: probabilities before and after truncation, (rows, vocabulary).
        """
        survives = left > 0
        counts = survives.sum(-1)
        small = counts <= self.limit
        if not bool(small.all()):
            last = probabilities.where(survives, torch.inf).amin(-1).log()
            next_ = probabilities.where(~survives, 0.0).amax(-1).log()  # −∞: nothing was left out
            self.threshold[rows, step] = ((last + next_) / 2).where(~small, torch.inf)
        row, ids = (survives & small[:, None]).nonzero(as_tuple=True)
        self.counts[rows, step] = counts.where(small, 0).int()
        self.rows.append(rows[row].int())
        self.ids.append(ids.int())

    def of_rows(self, lengths: Sequence[int]) -> list[SamplingSupport]:
        """Return the support of each row's first ``lengths`` tokens; later notes are dropped."""
        order = torch.cat(self.rows).argsort(stable=True)
        ids, counts = torch.cat(self.ids)[order].cpu(), self.counts.cpu()
        parts = ids.split(counts.sum(-1).tolist())
        return [  # copies, so that what one completion carries is its own alone
            SamplingSupport(
                row_counts[:n].clone(),
                part[: int(row_counts[:n].sum())].clone(),
                threshold[:n].clone(),
            )
            for row_counts, part, threshold, n in zip(
                counts, parts, self.threshold.cpu(), lengths, strict=True
            )
        ]
