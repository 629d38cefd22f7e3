"""Evaluation: chains of single joint actions on held-out tasks, scored with the task reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from comlrl import distributed
from comlrl.rollout import Rollout, Shape
from comlrl.types import Sampling, Task, Tree


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
    own = distributed.share(tasks)
    grown = [rollout.grow(own, chain, sampling, (*key, s)) for s in range(samples)]
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
    passed: dict[str, list[bool]] = {}
    for tree in trees:
        passed.setdefault(tree.task.task_id, []).append(chain_passed(tree))
    values = [pass_at_k(len(each), sum(each), k) for each in passed.values()]
    return sum(values) / len(values)
