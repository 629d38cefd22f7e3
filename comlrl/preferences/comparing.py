"""Comparators: which of two joint texts is better, when the task reward does not decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from comlrl.keyed import order, uniforms
from comlrl.preferences.candidates import ROUNDING, CandidateSet, Pair, Verdicts
from comlrl.rollout.grow import Rollout
from comlrl.types import JointAction, Sampling, Shape, Task

Texts = tuple[str, ...]  # what each agent of a team wrote


class Comparator(Protocol):
    """A function of a task and two joint texts, for many pairs of texts at once."""

    def __call__(self, task: Task, texts_P: Sequence[tuple[Texts, Texts]]) -> list[int | None]:
        """Of each pair 1: the first is better, −1: the second, 0: neither, None: the answer
        could not be read, which counts as a tie."""


def compared(
    task: Task, candidates: CandidateSet, limit: int | None, comparator: Comparator, seed: int
) -> CandidateSet:
    """The candidates with the verdicts on ``limit`` of their pairs, chosen by key (None: all).

    Equal texts are ties, and nobody is asked about them.
    """
    texts_K = [candidate.texts_N for candidate in candidates.candidates_K]
    reward_K = [candidate.reward for candidate in candidates.candidates_K]
    every = list(combinations(range(len(texts_K)), 2))
    key = (seed, "compared", candidates.round, candidates.task_id)
    # Which of a pair comes first is drawn too: judges may favour the place.
    turned = uniforms((*key, "turned"), len(every)) < 0.5
    chosen = [every[i][::-1] if turned[i] else every[i] for i in order(key, len(every))[:limit]]
    asked = [(a, b) for a, b in chosen if texts_K[a] != texts_K[b]]
    verdicts = comparator(task, [(texts_K[a], texts_K[b]) for a, b in asked])
    decided = [
        (a, b) if verdict > 0 else (b, a)
        for (a, b), verdict in zip(asked, verdicts, strict=True)
        if verdict
    ]
    pairs = tuple(Pair(w, r, reward_K[w] - reward_K[r]) for w, r in decided)
    unreadable = sum(verdict is None for verdict in verdicts)
    return replace(candidates, verdicts=Verdicts(pairs, len(chosen) - len(pairs), unreadable))


class EarlierTeam:
    """A comparator by an earlier team's answers to the task: the better text beats more of them, by
    the task reward; a tie with one counts half."""

    def __init__(self, rollout: Rollout, sampling: Sampling, shape: Shape) -> None:
        """``rollout``: of the earlier team. ``shape``: how many answers of it to a task."""
        self.rollout, self.sampling, self.shape = rollout, sampling, shape
        self._rewards: dict[str, list[float]] = {}  # by task

    def __call__(self, task: Task, texts_P: Sequence[tuple[Texts, Texts]]) -> list[int | None]:
        different = list(dict.fromkeys(texts for pair in texts_P for texts in pair))
        scores = self.rollout.reward.score([JointAction(task, texts) for texts in different])
        standing = {
            texts: self._standing(task, score.value)
            for texts, score in zip(different, scores, strict=True)
        }
        return [(standing[a] > standing[b]) - (standing[a] < standing[b]) for a, b in texts_P]

    def _standing(self, task: Task, value: float) -> float:
        if task.task_id not in self._rewards:
            (tree,) = self.rollout.grow([task], self.shape, self.sampling, ("earlier",))
            self._rewards[task.task_id] = [s.value for node in tree.nodes for s in node.scores_K]
        rewards = self._rewards[task.task_id]
        return sum((value > each + ROUNDING) + (value >= each - ROUNDING) for each in rewards) / 2
