"""The scorecard: scores of several algorithms on several tasks, over seeds.

A task's score puts its floor at 0 and its optimum at 1, so that tasks with different rewards can be
compared. Scores below the floor are negative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of an algorithm on a task. ``reason``: why it has no score, else None."""

    algorithm: str
    task: str
    seed: int
    _: KW_ONLY
    value: float | None = None  # mean total reward of an evaluation episode
    floor: float | None = None  # of that value, and its optimum
    optimum: float | None = None
    score: float | None = None
    noise: float | None = None  # standard error of ``score`` from a finite evaluation
    joint_actions: int | None = None  # scored in training
    seconds: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An algorithm on a task, over seeds. Without a score, ``mean`` is None."""

    mean: float | None
    deviation: float | None  # sample standard deviation over seeds; None: one seed
    noise: float | None  # mean over the seeds
    seeds: int
    reasons: tuple[str, ...] = ()


def episode_value(metrics: Mapping[str, float], num_turns: int) -> float:
    """Compute the mean total reward of an episode, from the metrics of an evaluation whose
    episodes all have ``num_turns`` turns."""
    if num_turns == 1:
        return metrics["reward_mean"]
    return sum(metrics[f"turn_{turn}/reward_mean"] for turn in range(1, num_turns + 1))


def episode_noise(metrics: Mapping[str, float], num_turns: int, episodes: int) -> float:
    """Compute the standard error of ``episode_value`` from so many episodes; with several turns
    an upper bound, because the turns' rewards are not independent."""
    turns = [f"turn_{turn}/" for turn in range(1, num_turns + 1)] if num_turns > 1 else [""]
    return sum(metrics[f"{turn}reward_std"] for turn in turns) / math.sqrt(episodes)


def cross_play_values(matrix: Sequence[Sequence[float]]) -> list[float]:
    """Compute each run's mean value with partners of the other runs, in either place.

    ``matrix``: row, the run of the others; column, the run of the last agent; at least two runs.
    """
    runs = range(len(matrix))
    return [statistics.fmean(matrix[i][j] + matrix[j][i] for j in runs if j != i) / 2 for i in runs]


def entries(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], Entry]:
    """Group the seeds of each (algorithm, task), in the order of first appearance."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.algorithm, outcome.task), []).append(outcome)
    return {key: _entry(group) for key, group in groups.items()}


def _entry(group: Sequence[Outcome]) -> Entry:
    scores = [outcome.score for outcome in group if outcome.score is not None]
    noises = [outcome.noise for outcome in group if outcome.noise is not None]
    reasons = tuple(dict.fromkeys(outcome.reason for outcome in group if outcome.reason))
    return Entry(
        mean=statistics.fmean(scores) if scores else None,
        deviation=statistics.stdev(scores) if len(scores) > 1 else None,
        noise=statistics.fmean(noises) if noises else None,
        seeds=len(scores),
        reasons=reasons,
    )
