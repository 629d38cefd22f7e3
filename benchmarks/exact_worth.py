"""Credit fidelity: does an advantage rank the agents' completions as their exact worth does?

The policies are tables of independent agents, so that what a completion is worth can be enumerated.
For a joint action a, v(S) is the expected reward where the agents in S keep their completions and
each other one is replaced by a draw from its own policy:

    D_i(a) = v(P) − v(P∖i)                      difference reward (Wolpert & Tumer 2001)
    φ_i(a) = the Shapley value of v             (Shapley 1953)
    A_i(a_i) = v({i}) − v(∅)                    advantage in the exact policy gradient

D_i and φ_i belong to one joint action. A_i is the mean of D_i over the others' policies, and it is
what an agent's expected update weighs its completion by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from comlrl.evaluation.contributions import coalitions, difference_rewards, shapley_values

# (…, N, A) probabilities of each agent's answers → (…,) expected reward
Expected = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Worth:
    """Exact worth of each agent's completion in one joint action; each of shape (N,)."""

    difference: np.ndarray
    shapley: np.ndarray
    advantage: np.ndarray


def worth(action_N: Sequence[int], probability_NA: np.ndarray, expected: Expected) -> Worth:
    """Return the exact worth of a joint action's completions. ``action_N``: answer indices."""
    agents = range(len(action_N))
    sets = coalitions(agents)
    chosen_NA = np.eye(probability_NA.shape[1])[list(action_N)]
    present_SN = np.array([[i in s for i in agents] for s in sets])
    values_S = expected(np.where(present_SN[:, :, None], chosen_NA, probability_NA))
    value = dict(zip(sets, values_S, strict=True))
    alone = [value[frozenset({i})] - value[frozenset()] for i in agents]
    return Worth(
        np.array(list(difference_rewards(value).values())),
        np.array(list(shapley_values(value).values())),
        np.array(alone),
    )


def enumerated(reward: Callable[[tuple[int, ...]], float]) -> Expected:
    """Return the expected reward of independent policies, summed over all joint actions."""

    def expected(probability_NA: np.ndarray) -> np.ndarray:
        count, answers = probability_NA.shape[-2:]
        total = np.zeros(probability_NA.shape[:-2])
        for action in itertools.product(range(answers), repeat=count):
            chance = np.prod([probability_NA[..., i, a] for i, a in enumerate(action)], axis=0)
            total += reward(action) * chance
        return total

    return expected


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's ρ; equal values share the mean of their ranks.

    NaN if all values on one side are equal.
    """
    ranks = np.array([_ranks(np.asarray(values, float)) for values in (first, second)])
    if (ranks == ranks[:, :1]).all(axis=1).any():
        return float("nan")
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks, 1-based; values that differ only by rounding are equal."""
    _, place, count = np.unique(values.round(9), return_inverse=True, return_counts=True)
    last = count.cumsum()
    return (last - (count - 1) / 2)[place]
