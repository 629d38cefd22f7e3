"""Evaluation: chains of single joint actions on held-out tasks, scored with the task reward.

Estimates are means over tasks; their 95% intervals come from resampling tasks with replacement
(percentile bootstrap), the samples of a task staying together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.processes import distributed
from comlrl.rollout.grow import Rollout
from comlrl.types import Sampling, Shape, Task, Tree

Grow = Callable[[Sequence[Task], tuple], list[Tree]]  # (tasks, key) → one tree for each task
Metrics = Callable[[Sequence[Tree]], Mapping[str, float]]


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    shape: Shape,
    sampling: Sampling,
    samples: int = 1,
    key: tuple = ("eval",),
) -> list[Tree]:
    """``samples`` independent chains for each task, each one tree; sample by sample.

    The keys are the same at every evaluation, so that two evaluations differ by the policy alone.
    """
    chain = replace(shape, num_generations=1, joint_mode="align", handoff=None)
    return repeat(lambda own, each: rollout.grow(own, chain, sampling, each), tasks, samples, key)


def repeat(
    grow: Grow, tasks: Sequence[Task], samples: int = 1, key: tuple = ("eval",)
) -> list[Tree]:
    """``samples`` trees for each task, however ``grow`` makes them; sample by sample."""
    own = distributed.share(tasks)
    grown = [grow(own, (*key, s)) for s in range(samples)]
    return [tree for trees in grown for tree in distributed.gather(trees)]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Raises ValueError where k exceeds the number of samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples; there are {samples}")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod((samples - passed - i) / (samples - i) for i in range(k))


def chain_passed(tree: Tree) -> bool:
    """Whether a chain passed all its tests at the last turn that it reached."""
    breakdown = tree.nodes[-1].scores_K[0].breakdown
    return breakdown is not None and breakdown.passed_all


def mean_pass_at_k(trees: Sequence[Tree], k: int) -> float:
    """pass@k averaged over tasks, from chains of ``evaluate``."""
    values = [_pass_at_k(chains, k) for chains in by_task(trees).values()]
    return sum(values) / len(values)


def by_task(trees: Sequence[Tree]) -> dict[str, list[Tree]]:
    """A task's name → its chains, in the order in which they were sampled."""
    groups: dict[str, list[Tree]] = {}
    for tree in trees:
        groups.setdefault(tree.task.task_id, []).append(tree)
    return groups


def task_rows(trees: Sequence[Tree], ks: Sequence[int]) -> list[dict[str, Any]]:
    """For each task: samples, how many passed, pass@k and mean raw reward of the last turn."""
    return [
        {
            "task_id": name,
            "samples": len(chains),
            "passed": sum(map(chain_passed, chains)),
            "reward_mean": sum(_last_reward(tree) for tree in chains) / len(chains),
        }
        | {f"pass@{k}": _pass_at_k(chains, k) for k in ks}
        for name, chains in by_task(trees).items()
    ]


def estimates(
    trees: Sequence[Tree], metrics: Metrics, ks: Sequence[int], seed: int = 0
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """(metrics of all trees with pass@k, the 95% interval of each that is a mean over tasks).

    A task counts by its number of samples that reached the turn that a metric is about. Spreads,
    counts and what depends on the clock have no interval.
    """
    point = dict(metrics(trees)) | {f"pass@{k}": mean_pass_at_k(trees, k) for k in ks}
    values_B = []
    for chains in by_task(trees).values():
        own = dict(metrics(chains)) | {f"pass@{k}": _pass_at_k(chains, k) for k in ks}
        values_B.append((own, chains))
    intervals = {}
    for name in point:
        if _is_mean(name):
            weight_B = np.array([_reached(name, chains) for _, chains in values_B], float)
            value_B = np.array([own.get(name, 0.0) for own, _ in values_B])
            intervals[name] = bootstrap_interval(value_B, weight_B, seed)
    return point, intervals


def _pass_at_k(chains: Sequence[Tree], k: int) -> float:
    return pass_at_k(len(chains), sum(map(chain_passed, chains)), k)


def _last_reward(tree: Tree) -> float:
    return tree.nodes[-1].scores_K[0].value


def _is_mean(name: str) -> bool:
    plain = name.rpartition("/")[2]
    counted = plain in ("reward_std", "tasks", "joint_actions")
    return not counted and not any(word in name for word in ("second", "time/", "memory"))


def _reached(name: str, chains: Sequence[Tree]) -> int:
    """Chains that reached the turn that ``turn_T/…`` is about; bare names: all. Of what is known of
    solved programs alone, those that are solved there."""
    prefix, slash, plain = name.partition("/")
    nodes = [tree.nodes[-1] for tree in chains]
    if slash and prefix.startswith("turn_"):
        turn = int(prefix.removeprefix("turn_"))
        nodes = [node for tree in chains for node in tree.nodes if node.turn == turn]
    if "aux_needed_rate" in (name, plain):
        known = (node.scores_K[0].breakdown for node in nodes)
        return sum(b is not None and b.needed is not None for b in known)
    return len(nodes)
