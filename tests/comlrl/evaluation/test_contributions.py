"""Values of agents and what answers cost, computed by hand; the plain slow way beside the fast."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from comlrl.evaluation import contributions
from comlrl.evaluation.contributions import coalitions, difference_rewards, shapley_values
from comlrl.evaluation.cost import cost, weights_of
from comlrl.evaluation.cross_play import SILENCE, CachingSampler
from comlrl.types import Request
from tests.support.fakes import SAMPLING, SEED, FakeSampler
from tests.support.made_runs import agent_turn, node, tree
from tests.support.tiny_models import team


def _values(**values: float) -> dict[frozenset[int], np.ndarray]:
    """``v01=4`` → the value of agents 0 and 1 together, of one task."""
    return {frozenset(map(int, name[1:])): np.array([float(x)]) for name, x in values.items()}


THREE = _values(v=0, v0=1, v1=0, v2=2, v01=4, v02=3, v12=2, v012=9)


def test_shapley_values_of_three_by_hand():
    found = shapley_values(THREE)
    # Agent 0: v0/3 + (v01 − v1)/6 + (v02 − v2)/6 + (v012 − v12)/3 = 1/3 + 4/6 + 1/6 + 7/3
    assert found[0] == pytest.approx(3.5)
    # Agent 1: 0/3 + (4 − 1)/6 + (2 − 2)/6 + (9 − 3)/3
    assert found[1] == pytest.approx(2.5)
    # Agent 2: 2/3 + (3 − 1)/6 + (2 − 0)/6 + (9 − 4)/3
    assert found[2] == pytest.approx(3.0)


def test_difference_rewards_by_hand():
    found = difference_rewards(THREE)  # 9 − v12, 9 − v02, 9 − v01
    assert {i: value.item() for i, value in found.items()} == {0: 7.0, 1: 6.0, 2: 5.0}


def test_shapley_values_are_mean_gains_over_all_orders_of_joining():
    random = np.random.default_rng(3)
    value = {c: random.normal(size=7) for c in coalitions(range(4))}
    orders = list(itertools.permutations(range(4)))
    slow = {
        i: sum(
            value[frozenset(o[: o.index(i) + 1])] - value[frozenset(o[: o.index(i)])]
            for o in orders
        )
        / len(orders)
        for i in range(4)
    }
    fast = shapley_values(value)
    for i in range(4):
        np.testing.assert_allclose(fast[i], slow[i])
    gain = value[frozenset(range(4))] - value[frozenset()]
    np.testing.assert_allclose(sum(fast.values()), gain)


def test_each_task_is_compared_with_itself():
    """Tasks differ by far more than agents add: the interval is of what they add."""
    rows = {
        frozenset({0}): [{"reward_mean": 10.0}, {"reward_mean": 1.0}, {"reward_mean": 100.0}],
        frozenset(): [{"reward_mean": 9.0}, {"reward_mean": 0.0}, {"reward_mean": 99.0}],
    }
    found = contributions.summary(rows, seed=0)["reward_mean"]
    assert found["together"] == {"mean": 1.0, "interval": (1.0, 1.0)}
    assert found["shapley"]["0"] == found["difference_rewards"]["0"] == found["together"]


def test_a_metric_that_a_task_lacks_is_left_out():
    rows = [{"reward_mean": 1.0, "pass@1": 1.0}, {"reward_mean": 1.0}]
    assert list(contributions.summary({frozenset({0}): rows, frozenset(): rows}, 0)) == [
        "reward_mean"
    ]


def test_a_silent_agent_is_not_asked():
    fake = FakeSampler()
    sampler = CachingSampler(fake, 2)
    sampler.weights_N = [None, "own"]
    requests = [[Request((1,), ((SEED, "A", (), agent, 0),))] for agent in range(2)]
    groups_N = sampler.sample(requests, SAMPLING)
    assert groups_N[0] == [(SILENCE,)] and groups_N[1][0][0].text == "A||1|0"
    assert fake.calls == [[0, 1]]
    sampler.weights_N = ["own", "own"]
    assert sampler.sample(requests, SAMPLING)[0][0][0].text == "A||0|0"
    assert fake.calls == [[0, 1], [1, 0]]  # the second is remembered


def test_cost_by_hand():
    trees = [
        tree(node([1.0, 2.0], agents=(agent_turn(["abc", "de"]), agent_turn(["f", "gh"])))),
        tree(node([1.0], agents=(agent_turn([""]), agent_turn(["ijkl"])))),  # the first is silent
    ]
    found = cost(trees, [10, 100])
    # Prompts have two tokens. The first agent reads 2 and writes 5; the second 2 and 3, 2 and 4.
    assert found["model_calls"] == 3 and found["prompt_tokens"] == 6
    assert found["tokens_generated"] == 12 and found["tokens_per_answer"] == 6
    assert found["flops"] == 2 * 10 * 7 + 2 * 100 * (5 + 6) == 2 * found["flops_per_answer"]


def test_weights_that_a_token_meets_by_hand():
    # A layer: q and o 32 · 32, k and v 16 · 32, three of 32 · 48, two norms of 32 → 7,744.
    # Two layers, the last norm (32) and the head (300 · 32), not the embedding: 25,120.
    whole = team("llama", lora__enabled=False)
    assert [weights_of(whole, agent) for agent in (0, 1)] == [25_120, 25_120]
    # A separate adapter, r = 4 on q: 4 · (32 + 32) in each layer.
    adapted = team("llama", lora__r=4, lora__target_modules=["q_proj"])
    assert weights_of(adapted, 1) == 25_120 + 512


def test_an_embedding_counts_where_it_is_the_head():
    # GPT-2: 300 · 32 of both; positions are looked up. A layer: 4 · 32 · 32 + 2 · 32 · 128 and
    # biases of 4 · 32 + 128 + 32, two norms of 2 · 32 → 12,704; the last norm 64.
    assert weights_of(team("gpt2", lora__enabled=False), 0) == 9_600 + 2 * 12_704 + 64
