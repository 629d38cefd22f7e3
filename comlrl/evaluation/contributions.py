"""Agents' contributions: a team's value with each subset of its agents, the others replaced.

Agents outside a coalition are replaced by their initial policy, by silence or by another agent.
Values and contributions are arrays over tasks, of shape (B,), so that means over tasks and their
intervals compare each task with itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from math import factorial
from typing import TYPE_CHECKING, Any

import numpy as np

from comlrl.evaluation.cross_play import CachingSampler, Weights
from comlrl.evaluation.intervals import bootstrap_interval
from comlrl.types import RolloutResult

if TYPE_CHECKING:
    import torch

    from comlrl.models.team import Team

Coalition = frozenset[int]  # the agents that are not replaced
COMPARED = re.compile(r"(agent_\d+/)?reward_mean$|pass@")  # keys of a task's row


def coalitions(agents: Collection[int]) -> list[Coalition]:
    """Return all subsets of ``agents``, the full set first."""
    sizes = range(len(agents), -1, -1)
    return [frozenset(c) for n in sizes for c in itertools.combinations(sorted(agents), n)]


def play(
    team: Team,
    sampler: CachingSampler,
    team_weights: Weights,
    absent: Mapping[int, dict[str, torch.Tensor] | None],
    grow: Callable[[], list[RolloutResult]],
) -> dict[Coalition, list[RolloutResult]]:
    """Grow trees with every coalition of the agents in ``absent``, which maps each to its
    replacement: weights, or None for silence. Changes the team's weights."""
    trees = {}
    for present in coalitions(absent):
        gone = {i: other for i, other in absent.items() if i not in present}
        weights = {f"agent_{i}": other for i, other in gone.items() if other is not None}
        team.load_tensors({**team_weights, **weights})
        sampler.weights_N = [
            "own" if i not in gone else None if gone[i] is None else "other"
            for i in range(len(team))
        ]
        trees[present] = grow()
    return trees


def difference_rewards(value: Mapping[Coalition, np.ndarray]) -> dict[int, np.ndarray]:
    """Compute D_i = v(P) − v(P∖i), P being all agents (Wolpert & Tumer 2001, with i replaced)."""
    all_agents = max(value, key=len)
    return {i: value[all_agents] - value[all_agents - {i}] for i in sorted(all_agents)}


def shapley_values(value: Mapping[Coalition, np.ndarray]) -> dict[int, np.ndarray]:
    """Compute φ_i = Σ_{S ⊆ P∖i} |S|! (|P| − |S| − 1)! / |P|! · (v(S ∪ i) − v(S)) (Shapley 1953).

    They sum to v(P) − v(∅). ``value``: the value of every subset of P, the set of all agents.
    """
    all_agents = max(value, key=len)
    count = len(all_agents)
    assert len(value) == 2**count, "a coalition is missing"
    return {
        i: sum(
            (
                factorial(len(s)) * factorial(count - len(s) - 1) / factorial(count)
                * (value[s | {i}] - value[s])
                for s in value if i not in s
            ),
            start=np.zeros(()),
        )
        for i in sorted(all_agents)
    }  # fmt: skip


def summary(rows: Mapping[Coalition, Sequence[Mapping[str, Any]]], seed: int) -> dict[str, Any]:
    """Return difference rewards and Shapley values of each agent, and the joint gain v(P) − v(∅),
    with 95% intervals over tasks. ``rows``: from ``estimates.task_rows``. Values are the mean
    reward (the team's and each agent's) and each pass@k."""
    first = next(iter(rows.values()))
    common = set.intersection(*(set(row) for task_rows in rows.values() for row in task_rows))
    metrics = {}
    for name in (n for n in first[0] if n in common and COMPARED.match(n)):
        value = {c: np.array([row[name] for row in task_rows]) for c, task_rows in rows.items()}
        together = value[max(value, key=len)] - value[frozenset()]
        contributions = {
            "difference_rewards": difference_rewards(value),
            "shapley": shapley_values(value),
        }
        metrics[name] = {"together": _mean(together, seed)} | {
            key: {str(i): _mean(each, seed) for i, each in of_agents.items()}
            for key, of_agents in contributions.items()
        }
    return metrics


def _mean(value_B: np.ndarray, seed: int) -> dict[str, Any]:
    return {"mean": float(value_B.mean()), "interval": bootstrap_interval(value_B, seed=seed)}
