"""Who says which of two joint texts is better, where that is not the task reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from comlrl.keyed import order
from comlrl.preferences.candidates import CandidateSet, Pair, Verdicts, joint_texts
from comlrl.types import Task


class Comparator(Protocol):
    """A function of a task and two joint texts, for many pairs of texts at once."""

    def __call__(self, task: Task, texts_P: Sequence[tuple[str, str]]) -> list[int]:
        """Of each pair 1: the first is better, −1: the second, 0: neither."""


def compared(
    task: Task, candidates: CandidateSet, limit: int | None, comparator: Comparator, seed: int
) -> CandidateSet:
    """The candidates with the verdicts on ``limit`` of their pairs, chosen by key (None: all).

    Equal texts are ties, and nobody is asked about them.
    """
    texts_K, reward_K = joint_texts(candidates), [c.reward for c in candidates.candidates_K]
    every = list(combinations(range(len(texts_K)), 2))
    key = (seed, "compared", candidates.round, candidates.task_id)
    # Which of a pair comes first is drawn too: judges may favour the place.
    turned = order((*key, "turned"), 2 * len(every))
    chosen = [
        every[i] if turned[i] < len(every) else every[i][::-1]
        for i in order(key, len(every))[:limit]
    ]
    asked = [(a, b) for a, b in chosen if texts_K[a] != texts_K[b]]
    said = comparator(task, [(texts_K[a], texts_K[b]) for a, b in asked])
    told = [(a, b) if verdict > 0 else (b, a) for (a, b), verdict in zip(asked, said, strict=True)
            if verdict]  # fmt: skip
    pairs = tuple(Pair(w, r, reward_K[w] - reward_K[r]) for w, r in told)
    return replace(candidates, verdicts=Verdicts(pairs, len(chosen) - len(pairs)))
