"""Top-k and top-p: what they leave at each position, and a record of it to learn over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comlrl.types import Sampling, SamplingSupport


def truncated(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero what top-k and top-p (the smallest set of at least that mass) leave out."""
    if sampling.top_k is not None and sampling.top_k < probabilities.shape[-1]:
        least = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = probabilities.sort(dim=-1, descending=True)
        total = ordered.sum(-1, keepdim=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.where(before < sampling.top_p * total, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return probabilities


class Survivors:
    """The sets of a batch while it is decoded, at most ``limit`` tokens each."""

    def __init__(self, rows: int, steps: int, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.counts = torch.zeros(rows, steps, dtype=torch.int32, device=device)
        self.threshold = torch.full((rows, steps), torch.inf, device=device)
        self.rows: list[torch.Tensor] = []  # of each id
        self.ids: list[torch.Tensor] = []

    def note(self, whole: torch.Tensor, left: torch.Tensor, rows: torch.Tensor, step: int) -> None:
        """``whole``, ``left``: probabilities before and after truncation, (rows, vocabulary)."""
        survives = left > 0
        counts = survives.sum(-1)
        small = counts <= self.limit
        if not bool(small.all()):
            last = whole.where(survives, torch.inf).amin(-1).log()
            next_ = whole.where(~survives, 0.0).amax(-1).log()  # −∞: nothing was left out
            self.threshold[rows, step] = ((last + next_) / 2).where(~small, torch.inf)
        row, ids = (survives & small[:, None]).nonzero(as_tuple=True)
        self.counts[rows, step] = counts.where(small, 0).int()
        self.rows.append(rows[row].int())
        self.ids.append(ids.int())

    def of_rows(self, lengths: Sequence[int]) -> list[SamplingSupport]:
        """Those of each row's first tokens, ``lengths`` of them; later notes are dropped."""
        order = torch.cat(self.rows).argsort(stable=True)
        ids, counts = torch.cat(self.ids)[order].cpu(), self.counts.cpu()
        parts = ids.split(counts.sum(-1).tolist())
        return [  # copies, so that what one completion carries is its own alone
            SamplingSupport(
                own[:n].clone(), part[: int(own[:n].sum())].clone(), threshold[:n].clone()
            )
            for own, part, threshold, n in zip(
                counts, parts, self.threshold.cpu(), lengths, strict=True
            )
        ]
