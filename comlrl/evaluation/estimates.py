"""Evaluation: chains of single joint actions on held-out tasks, scored with the task reward.

Estimates are means over tasks. Their 95% intervals come from resampling tasks, with all of their
samples, with replacement (percentile bootstrap).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from comlrl.evaluation.batches import at_once
from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.evaluation.metrics import tree_metrics
from comlrl.evaluation.outcomes import outcomes
from comlrl.processes import distributed
from comlrl.programs.rollout import ProgramRollout
from comlrl.rollout.grow import Rollout
from comlrl.types import Domain, RolloutResult, Sampling, Shape, Task

# Turn (None: the last one that a chain reached) → measures of each chain's joint action
_Measured = defaultdict[int | None, list[Mapping[str, float]]]
# (tasks, keys) → one tree for each task and its key; tasks may repeat
Grow = Callable[[Sequence[Task], Sequence[tuple]], Sequence[RolloutResult]]


def evaluate(
    rollout: Rollout | ProgramRollout,
    tasks: Sequence[Task],
    shape: Shape,
    sampling: Sampling,
    samples: int = 1,
) -> list[RolloutResult]:
    """Grow ``samples`` independent chains for each task, each a tree, ordered by sample.

    All evaluations use the same sampling keys, so that two evaluations differ only by the policy.
    """

    def grow(shard: Sequence[Task], keys: Sequence[tuple]) -> Sequence[RolloutResult]:
        return rollout.grow_each(shard, shape.chain, sampling, keys)

    return repeat(grow, tasks, samples)


def repeat(
    grow: Grow,
    tasks: Sequence[Task],
    samples: int = 1,
) -> list[RolloutResult]:
    """Grow ``samples`` trees for each task with ``grow``, ordered by sample. A collective call."""
    deal = distributed.deal(tasks)
    shard = deal.shard(tasks)
    together = at_once(max(distributed.all_gather(len(shard))))  # the same on all processes
    grown: list[RolloutResult] = []
    for first in range(0, samples, together):
        numbers = range(first, min(first + together, samples))
        keys = [("eval", number) for number in numbers for _ in shard]
        grown += grow(shard * len(numbers), keys)
    of_sample = [grown[s * len(shard) : (s + 1) * len(shard)] for s in range(samples)]
    return [tree for trees in of_sample for tree in deal.gather(trees)]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Compute the unbiased pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Raises ValueError if k is less than 1 or exceeds the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples; there are {samples}")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod((samples - passed - i) / (samples - i) for i in range(k))


def pass_rates(trees: Sequence[RolloutResult], ks: Sequence[int]) -> dict[str, float]:
    """Compute pass@k for each k, averaged over tasks, from chains of ``evaluate``. Empty if the
    reward does not define passing."""
    tasks = [counts for chains in by_task(trees).values() if (counts := _counts(chains))]
    if not tasks:
        return {}
    return {f"pass@{k}": sum(pass_at_k(*c, k) for c in tasks) / len(tasks) for k in ks}


def by_task(trees: Sequence[RolloutResult]) -> dict[str, list[RolloutResult]]:
    """Return a mapping from task ids to their chains, in the order of sampling."""
    groups: dict[str, list[RolloutResult]] = {}
    for tree in trees:
        groups.setdefault(tree.task.task_id, []).append(tree)
    return groups


def task_rows(trees: Sequence[RolloutResult], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each task: number of samples, mean raw reward of the last turn (the team's
    and, if separate, each agent's) and, if defined, the number that passed and pass@k."""
    rows = []
    for name, chains in by_task(trees).items():
        row: dict[str, Any] = {"task_id": name, "samples": len(chains)}
        if counts := _counts(chains):
            row["passed"] = counts[1]
        row["reward_mean"] = sum(tree.final_score.value for tree in chains) / len(chains)
        reward_CN = [tree.final_score.by_agent for tree in chains if tree.final_score.by_agent]
        for agent, reward_C in enumerate(zip(*reward_CN, strict=True)):
            row[f"agent_{agent}/reward_mean"] = sum(reward_C) / len(reward_C)
        rows.append(row | pass_rates(chains, ks))
    return rows


def estimates(
    trees: Sequence[RolloutResult], domain: Domain, ks: Sequence[int], seed: int = 0
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Return (metrics of all trees, including pass@k; the 95% interval of each that is a mean over
    tasks).

    In the interval of a metric a task is weighted by the number of its samples that define it.
    Standard deviations, counts and times have no interval.
    """
    point = tree_metrics(trees, domain) | pass_rates(trees, ks)
    metrics_B, measured_B = [], []
    for chains in by_task(trees).values():
        metrics_B.append(tree_metrics(chains, domain) | pass_rates(chains, ks))
        measured_B.append(_measured(chains, domain))
    intervals = {}
    for name in filter(_is_mean, point):
        known_B = [
            _count_measured(name, measured) if name in metrics else 0
            for metrics, measured in zip(metrics_B, measured_B, strict=True)
        ]
        value_B = np.array([metrics.get(name, 0.0) for metrics in metrics_B])
        intervals[name] = bootstrap_interval(value_B, np.array(known_B, float), seed)
    return point, intervals


def _counts(chains: Sequence[RolloutResult]) -> tuple[int, int] | None:
    """Return (number of samples, number that passed at the last turn reached) of a task; None if
    the reward does not define passing."""
    passed = [p for tree in chains if (p := tree.final_score.passed) is not None]
    return (len(passed), sum(passed)) if passed else None


def _is_mean(name: str) -> bool:
    plain = name.rpartition("/")[2]
    return plain not in ("reward_std", "tasks", "joint_actions") and "seconds" not in plain.split(
        "_"
    )


def _count_measured(name: str, measured: _Measured) -> int:
    """Count the chains of a task that define a metric: those that reached turn T for ``turn_T/…``,
    otherwise all; for the domain's own measures only those that have them."""
    prefix, _, plain = name.partition("/")
    turn = int(prefix.removeprefix("turn_")) if prefix.startswith("turn_") else None
    chain_measures = measured[turn]
    return sum((name if turn is None else plain) in each for each in chain_measures) or len(
        chain_measures
    )


def _measured(chains: Sequence[RolloutResult], domain: Domain) -> _Measured:
    """Return the domain's measures of a task's chains, by turn."""
    by_turn: _Measured = defaultdict(list)
    for tree in chains:
        for outcome in outcomes(tree):
            action = outcome.actions_K[0]
            measured = {} if action is None else domain.measures(action, outcome.scores_K[0])
            by_turn[outcome.turn].append(measured)
            if outcome.last:
                by_turn[None].append(measured)
    return by_turn
