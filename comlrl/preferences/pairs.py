"""Selects preference pairs from joint candidates, and holds some of them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from comlrl.keyed import order
from comlrl.preferences.candidates import ROUNDING, CandidateSet, Pair, PreferenceError

AT_ONCE = 256  # least number of joint candidates sampled together, if there are as many


@dataclass(frozen=True, slots=True)
class TaskPairs:
    """One task's candidates and the pairs selected from them."""

    candidates: CandidateSet
    pairs: tuple[Pair, ...]
    ties: int  # number of dropped pairs, whose rewards are equal

    @property
    def task_id(self) -> str:
        return self.candidates.task_id


@dataclass(frozen=True, slots=True)
class Round:
    """One round's labelled candidates."""

    index: int
    tasks: tuple[TaskPairs, ...]  # all, including tasks without pairs
    train: tuple[TaskPairs, ...]
    held_out: tuple[TaskPairs, ...]

    @property
    def reward_mean(self) -> float:
        """The mean task reward of all candidates."""
        rewards = [c.reward for item in self.tasks for c in item.candidates.candidates_K]
        return sum(rewards) / len(rewards)


def tasks_at_once(batch_size: int, num_candidates: int) -> int:
    """Return how many tasks are sampled and saved together: the most that an interruption loses."""
    return max(batch_size, -(-AT_ONCE // num_candidates))


def select_pairs(
    rewards_K: Sequence[float],
    selection: str,
    limit: int | None,
    shuffle: Callable[[int], Sequence[int]],
) -> tuple[list[Pair], int]:
    """Select at most ``limit`` pairs (None: all); also return the number of ties dropped.

    ``reward_gap``: the largest gaps first; among equal gaps the pair whose candidates were used
    least, then the lowest indices, so that one winner does not dominate. ``random``: in the order
    of ``shuffle(count)``. ``all``: every pair.
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
    """Select each task's pairs by the task reward."""
    chosen = []
    for candidates in sets:
        rewards_K = [candidate.reward for candidate in candidates.candidates_K]
        key = (seed, "pairs", candidates.round, candidates.task_id)
        pairs, ties = select_pairs(rewards_K, selection, limit, partial(order, key))
        chosen.append(TaskPairs(candidates, tuple(pairs), ties))
    return chosen


def check_some(tasks: Sequence[TaskPairs]) -> None:
    """Check that some task has pairs. Raises PreferenceError otherwise."""
    if not any(item.pairs for item in tasks):
        raise PreferenceError(
            f"preferences: no task of {len(tasks)} has two candidates with different rewards; "
            "raise preference_num_candidates or the temperature"
        )


def hold_out(
    tasks: Sequence[TaskPairs], share: float, seed: int, earlier: Sequence[Round] = ()
) -> tuple[list[TaskPairs], list[TaskPairs]]:
    """Split tasks with pairs into training and held-out tasks.

    A task keeps the side it had in an ``earlier`` round, so that held-out tasks are never trained
    on. New tasks are drawn until the held-out part reaches ``share``; above 0, that is at least one
    task if there are two. Once every task has a side, a round may have no held-out tasks.
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
    """Return the content of ``preferences_summary.json``: counts, and a histogram of gaps."""
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
