"""The scorecard: scores of several algorithms on several tasks, over seeds.

A score is 0 at the task's floor and 1 at its optimum, so that tasks with different rewards are
comparable. Scores below the floor are negative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of an algorithm on a task. ``reason``: why it has no score; None if it has one."""

    algorithm: str
    task: str
    seed: int
    _: KW_ONLY
    value: float | None = None  # mean total reward of an evaluation episode
    floor: float | None = None  # the task's, as is ``optimum``
    optimum: float | None = None
    score: float | None = None
    noise: float | None = None  # standard error of ``score`` from a finite evaluation
    joint_actions: int | None = None  # scored in training
    seconds: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Results of an algorithm on a task, over seeds. Without a score, ``mean`` is None."""

    mean: float | None
    deviation: float | None  # sample standard deviation over seeds; None: fewer than two
    noise: float | None  # mean over the seeds
    seeds: int
    reasons: tuple[str, ...] = ()


def episode_value(metrics: Mapping[str, float], num_turns: int) -> float:
    """Compute the mean total reward of an episode from an evaluation's metrics. All episodes must
    have ``num_turns`` turns."""
    if num_turns == 1:
        return metrics["reward_mean"]
    return sum(metrics[f"turn_{turn}/reward_mean"] for turn in range(1, num_turns + 1))


def episode_noise(metrics: Mapping[str, float], num_turns: int, episodes: int) -> float:
    """Compute the standard error of ``episode_value`` over ``episodes`` episodes. With several
    turns it is an upper bound, because the turns' rewards are not independent."""
    turns = [f"turn_{turn}/" for turn in range(1, num_turns + 1)] if num_turns > 1 else [""]
    return sum(metrics[f"{turn}reward_std"] for turn in turns) / math.sqrt(episodes)


def cross_play_values(matrix: Sequence[Sequence[float]]) -> list[float]:
    """Compute each run's mean value with partners from other runs, on either side of the pairing.

    ``matrix``: rows are the runs of the other agents, columns those of the last agent; at least
    two runs.
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
