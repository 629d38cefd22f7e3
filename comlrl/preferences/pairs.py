"""Joint candidates → preference pairs, some of them held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from comlrl.keyed import order
from comlrl.preferences.candidates import ROUNDING, CandidateSet, Pair, PreferenceError

AT_ONCE = 256  # joint candidates that are sampled together at least, where there are so many


@dataclass(frozen=True, slots=True)
class TaskPairs:
    """The pairs of one task, with their candidates."""

    candidates: CandidateSet
    pairs: tuple[Pair, ...]
    ties: int  # pairs of candidates with equal rewards, dropped

    @property
    def task_id(self) -> str:
        return self.candidates.task_id


@dataclass(frozen=True, slots=True)
class Round:
    """One round's labelled candidates."""

    index: int
    tasks: tuple[TaskPairs, ...]  # all
    train: tuple[TaskPairs, ...]  # of those that have pairs
    held_out: tuple[TaskPairs, ...]

    @property
    def reward_mean(self) -> float:
        """The mean task reward of all candidates."""
        rewards = [c.reward for item in self.tasks for c in item.candidates.candidates_K]
        return sum(rewards) / len(rewards)


def tasks_at_once(batch_size: int, num_candidates: int) -> int:
    """Return the number of tasks sampled and saved together; an interruption loses no more."""
    return max(batch_size, -(-AT_ONCE // num_candidates))


def select_pairs(
    rewards_K: Sequence[float],
    selection: str,
    limit: int | None,
    shuffle: Callable[[int], Sequence[int]],
) -> tuple[list[Pair], int]:
    """Select at most ``limit`` (winner, loser) pairs (None: all); also return the ties dropped.

    ``reward_gap``: the largest gap first; of equal gaps the pair whose two candidates have been
    used least, then the lowest indices, so that one winner does not fill all pairs. ``random``:
    in the order of ``shuffle(count)``. ``all``: every pair.
    """
    count = len(rewards_K)
    pairs = [
        Pair(winner, loser, rewards_K[winner] - rewards_K[loser])
        for winner in range(count)
        for loser in range(count)
        if rewards_K[winner] - rewards_K[loser] > ROUNDING
    ]
    ties = count * (count - 1) // 2 - len(pairs)
    if limit is None or limit >= len(pairs):
        return pairs, ties
    if selection == "random":
        return [pairs[i] for i in shuffle(len(pairs))[:limit]], ties
    return _largest_gaps(pairs, limit, count), ties


def _largest_gaps(pairs: Sequence[Pair], limit: int, count: int) -> list[Pair]:
    def gap(pair: Pair) -> int:
        return round(pair.gap / ROUNDING)

    used = [0] * count
    chosen: list[Pair] = []
    for _, group in groupby(sorted(pairs, key=lambda p: -gap(p)), key=gap):
        equal = list(group)
        while equal and len(chosen) < limit:
            pair = min(equal, key=lambda p: (used[p.winner] + used[p.loser], p.winner, p.loser))
            equal.remove(pair)
            used[pair.winner] += 1
            used[pair.loser] += 1
            chosen.append(pair)
    return chosen


def task_pairs(
    sets: Iterable[CandidateSet], selection: str, limit: int | None, seed: int
) -> list[TaskPairs]:
    """Return each task's pairs, by the task reward."""
    chosen = []
    for candidates in sets:
        rewards_K = [candidate.reward for candidate in candidates.candidates_K]
        key = (seed, "pairs", candidates.round, candidates.task_id)
        pairs, ties = select_pairs(rewards_K, selection, limit, partial(order, key))
        chosen.append(TaskPairs(candidates, tuple(pairs), ties))
    return chosen


def check_some(tasks: Sequence[TaskPairs]) -> None:
    """Raise PreferenceError if no task has pairs."""
    if not any(item.pairs for item in tasks):
        raise PreferenceError(
            f"preferences: no task of {len(tasks)} has two candidates with different rewards; "
            "raise preference_num_candidates or the temperature"
        )


def hold_out(
    tasks: Sequence[TaskPairs], share: float, seed: int, earlier: Sequence[Round] = ()
) -> tuple[list[TaskPairs], list[TaskPairs]]:
    """Split tasks with pairs into (training, held-out), so that no candidate is in both.

    A task keeps its part of an ``earlier`` round, so that nothing is ever fitted to a held-out
    task. Of the others as many are drawn as make up the share, which above 0 is at least one task
    if there are two; once every task has had its pairs, a round may have none held out.
    """
    useful = [item for item in tasks if item.pairs]
    count = min(max(1, round(share * len(useful))), len(useful) - 1) if share > 0 else 0
    fitted = {item.task_id for made in earlier for item in made.train}
    held = {item.task_id for made in earlier for item in made.held_out}
    drawn = [useful[i].task_id for i in order((seed, "held-out", len(earlier)), len(useful))]
    held &= set(drawn)
    fresh = [name for name in drawn if name not in fitted | held]
    held |= set(fresh[: max(0, count - len(held))])
    return (
        [item for item in useful if item.task_id not in held],
        [item for item in useful if item.task_id in held],
    )


def summarize(tasks: Sequence[TaskPairs], held_out: Sequence[TaskPairs]) -> dict[str, Any]:
    """Return ``preferences_summary.json``: counts, and how many selected pairs have which gap."""
    gaps = [round(pair.gap, 6) for item in tasks for pair in item.pairs]
    return {
        "tasks": len(tasks),
        "tasks_without_pairs": sum(not item.pairs for item in tasks),
        "candidates": sum(len(item.candidates.candidates_K) for item in tasks),
        "pairs": len(gaps),
        "held_out_pairs": sum(len(item.pairs) for item in held_out),
        "ties_dropped": sum(item.ties for item in tasks),
        "gap_mean": sum(gaps) / len(gaps) if gaps else 0.0,
        "gaps": {f"{gap:g}": count for gap, count in sorted(Counter(gaps).items())},
    }
