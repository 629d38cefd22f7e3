"""PPO's and SHPPO's equations against plain float64 loops and numbers worked out by hand."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comlrl.credit.advantages import gae
from comlrl.models.logprobs import ActionLogprobs
from comlrl.models.rows import pack
from comlrl.processes.distributed import Deal
from comlrl.processes.statistics import Sums, explained_variance, moments, standardized
from comlrl.types import AgentTurn, Completion, Row, Task, Tree
from comlrl.update.losses import (
    clipped_policy,
    clipped_value,
    k3_kl,
    latent_distances,
    latent_diversity,
    latent_entropy,
    latent_logprob,
    latent_loss,
)
from comlrl.update.minibatches import minibatches
from comlrl.update.per_token import PerToken, advantages_of
from comlrl.update.policy_update import PolicyUpdate
from tests.support.plain_chains import chains_of
from tests.support.trees import node
from tests.support.turn_credit import turn_credit


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(0, 1) for _ in range(count)]


def tree(
    rewards: list[float], later: dict[int, float] | None = None, tokens: int = 1, agents: int = 1
) -> Tree:
    """A root with one joint action for each reward; ``later``: joint action → its child's reward.
    Every completion of every agent has ``tokens`` tokens."""

    def turns(count: int) -> list[AgentTurn]:
        completion = Completion("", tuple(range(tokens)), True)
        return [AgentTurn((), (7, 8), (completion,) * count)] * agents

    nodes = [node(turns(len(rewards)), rewards)]
    nodes += [
        node(turns(1), [value], turn=2, parent=0, action=action)
        for action, value in (later or {}).items()
    ]
    return Tree(Task("t"), tuple(nodes), "align", None)


def rewards_of(chains):
    """The reward of a completion of one agent alone."""
    return lambda number: chains.reward_C[number]


def per_token(values: dict[int, list[float]]) -> PerToken:
    kept = PerToken()
    kept.of_completion = {c: torch.tensor(v, dtype=torch.float64) for c, v in values.items()}
    return kept


# --- the clipped surrogate -------------------------------------------------------------------


def test_clipped_policy_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5, 1.1 with advantages 2, 2, −2, −2, 3 and ε = 0.2:
    # −min(3, 2.4) = −2.4; −min(1, 1.6) = −1; −min(−3, −2.4) = 3; −min(−1, −1.6) = 1.6; −3.3
    ratios = doubles(1.5, 0.5, 1.5, 0.5, 1.1)
    loss = clipped_policy(ratios.log(), torch.zeros(5), doubles(2, 2, -2, -2, 3), 0.2)
    torch.testing.assert_close(loss, doubles(-2.4, -1, 3, 1.6, -3.3))


def test_clipped_policy_gives_no_gradient_beyond_the_clip_and_the_policy_gradient_at_ratio_one():
    logprob = doubles(math.log(1.5), math.log(0.5), 0.0).requires_grad_()
    clipped_policy(logprob, torch.zeros(3), doubles(2, -2, 5), 0.2).sum().backward()
    # Beyond the clip on the side that the advantage wants: 0. At ρ = 1: −Â · ∇log π = −5.
    torch.testing.assert_close(logprob.grad, doubles(0, 0, -5))


@pytest.mark.parametrize("seed", range(3))
def test_clipped_losses_against_loops(seed):
    new, old, advantage, returns = (numbers(50, seed * 10 + i) for i in range(4))
    loss = clipped_policy(doubles(*new), doubles(*old), doubles(*advantage), 0.2)
    expected = []
    for n, o, a in zip(new, old, advantage, strict=True):
        ratio = math.exp(n - o)
        expected.append(-min(ratio * a, min(max(ratio, 0.8), 1.2) * a))
    torch.testing.assert_close(loss, doubles(*expected))
    value = clipped_value(doubles(*new), doubles(*old), doubles(*returns), 0.3)
    expected = []
    for v, o, r in zip(new, old, returns, strict=True):
        near = o + min(max(v - o, -0.3), 0.3)
        expected.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
    torch.testing.assert_close(value, doubles(*expected))


def test_clipped_value_by_hand():
    # V = 2, V_old = 1, R = 3, ε = 0.5: V_clip = 1.5; ½ max(1, 2.25) = 1.125. Unclipped: ½.
    one = doubles(2), doubles(1), doubles(3)
    assert clipped_value(*one, 0.5).item() == pytest.approx(1.125)
    assert clipped_value(*one, None).item() == pytest.approx(0.5)


def test_k3_is_zero_where_nothing_changed_and_unbiased():
    torch.testing.assert_close(k3_kl(doubles(-1, -2), doubles(-1, -2)), doubles(0, 0))
    p, q = doubles(0.5, 0.3, 0.2), doubles(0.2, 0.3, 0.5)
    # Weighted by the policy's own probabilities the estimate is the divergence itself:
    # Σ p log(p/q) = 0.5 log 2.5 + 0.2 log 0.4 = 0.27489
    assert (p * k3_kl(p.log(), q.log())).sum().item() == pytest.approx(0.274887, abs=1e-6)


def test_the_policys_loss_counts_what_the_log_says():
    batch = pack([Row((1,), ((2, 3, 4, 5),), (1.0,), (0,))], 0)
    section: Any = SimpleNamespace(takes_ratios=True, clip_range=0.2, entropy_coef=0.0)
    policy = PolicyUpdate(section, None, None, None, 1.0)  # type: ignore[arg-type]
    policy.old, policy.advantage = per_token({0: [0.0] * 4}), per_token({0: [1.0] * 4})
    ratios, sums = doubles(1.0, 1.5, 0.5, 1.1), Sums()
    policy.loss(batch, ActionLogprobs(ratios.log(), None, torch.empty(4, 0)), sums)
    means = sums.means("tokens")
    assert means["clip_fraction"] == 0.5  # 1.5 and 0.5
    assert means["ratio_max"] == pytest.approx(1.5)
    # KL(old ‖ new) by k3 from the old policy's samples: mean of (ρ − 1 − log ρ)
    expected = sum(r - 1 - math.log(r) for r in (1.0, 1.5, 0.5, 1.1)) / 4
    assert means["approx_kl"] == pytest.approx(expected)


# --- generalized advantage estimation --------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_gae_is_the_double_sum_of_its_definition(seed):
    length, gae_lambda = 9, 0.9
    rewards, values = numbers(length, seed), numbers(length, seed + 100)
    discounts = [random.Random(seed + 7).uniform(0.5, 1) for _ in range(length)]
    following = [*values[1:], 0.0]
    expected = []
    for start in range(length):
        total = 0.0
        for at in range(start, length):
            delta = rewards[at] + discounts[at] * following[at] - values[at]
            weight = math.prod(discounts[i] * gae_lambda for i in range(start, at))
            total += weight * delta
        expected.append(total)
    found = gae(doubles(*rewards), doubles(*values), doubles(*discounts), gae_lambda)
    torch.testing.assert_close(found, doubles(*expected))


def test_gae_extremes_are_monte_carlo_and_one_step():
    rewards, values, ones = doubles(1, 2, 4), doubles(0.5, 1, 2), doubles(1, 1, 1)
    # λ = 1: returns 7, 6, 4 less the values. λ = 0: r + V' − V = 1.5, 3, 2.
    torch.testing.assert_close(gae(rewards, values, ones, 1.0), doubles(6.5, 5, 2))
    torch.testing.assert_close(gae(rewards, values, ones, 0.0), doubles(1.5, 3, 2))


def test_token_advantages_cross_turns_once_and_never_tasks():
    """Two tasks; the first's only sample is continued to a second turn."""
    chains = chains_of([tree([1.0], {0: 2.0}, tokens=2), tree([8.0], tokens=2)])
    assert chains.chains == ((0, 1), (2,))
    value = per_token({0: [0.1, 0.2], 1: [0.3, 0.4], 2: [0.5, 0.6]})
    advantage, returns = advantages_of(
        chains.chains, rewards_of(chains), value, None, gamma_token=1.0, discount=0.5,
        gae_lambda=0.5,
    )  # fmt: skip
    # Backwards: δ3 = 2 − 0.4 = 1.6; δ2 = 0.4 − 0.3 = 0.1, A2 = 0.1 + 0.5 · 1.6 = 0.9.
    # The edge between the turns is discounted once: δ1 = 1 + 0.5 · 0.3 − 0.2 = 0.95,
    # A1 = 0.95 + 0.5 · 0.5 · 0.9 = 1.175; δ0 = 0.2 − 0.1 = 0.1, A0 = 0.1 + 0.5 · 1.175 = 0.6875.
    torch.testing.assert_close(advantage.of_completion[0], doubles(0.6875, 1.175))
    torch.testing.assert_close(advantage.of_completion[1], doubles(0.9, 1.6))
    # The other task alone: δ1 = 8 − 0.6 = 7.4; A0 = 0.6 − 0.5 + 0.5 · 7.4 = 3.8.
    torch.testing.assert_close(advantage.of_completion[2], doubles(3.8, 7.4))
    torch.testing.assert_close(returns.of_completion[2], doubles(4.3, 8.0))


def test_token_advantages_pay_for_the_divergence_token_by_token():
    chains = chains_of([tree([1.0], tokens=3)])
    keys = {"gamma_token": 1.0, "discount": 0.9, "gae_lambda": 1.0}
    value, penalty = per_token({0: [0, 0, 0]}), per_token({0: [0.1, 0.2, 0.3]})
    advantage, _ = advantages_of(chains.chains, rewards_of(chains), value, penalty, **keys)
    # V = 0, λ = 1: what is still to come: 1 − 0.6, 1 − 0.5, 1 − 0.3
    torch.testing.assert_close(advantage.of_completion[0], doubles(0.4, 0.5, 0.7))


def test_one_value_for_each_turn_makes_the_advantages_those_of_turns():
    """The main of a team of two (numbers 1, 3, 5, 7), whose divergence is paid for by the turn."""
    chains = chains_of([tree([1.0, 3.0], {0: 2.0, 1: 5.0}, tokens=3, agents=2)])
    numbered = chains.numbered([1])
    assert numbered == [[1, 5], [3, 7]]
    value = per_token({1: [1], 3: [1], 5: [2], 7: [3]})
    penalty = per_token({1: [0.5], 3: [0.5], 5: [0], 7: [1]})
    advantage, returns = advantages_of(
        numbered, chains.reward, value, penalty, gamma_token=0.1, discount=0.5,
        gae_lambda=0.5,
    )  # fmt: skip
    # First: 2 − 2 = 0, then 1 − 0.5 + 0.5 · 2 − 1 + 0.25 · 0 = 0.5; gamma_token is not in it.
    # Second: 5 − 1 − 3 = 1, then 3 − 0.5 + 0.5 · 3 − 1 + 0.25 · 1 = 3.25.
    expected = {1: 0.5, 5: 0.0, 3: 3.25, 7: 1.0}
    assert {n: float(a) for n, a in advantage.of_completion.items()} == expected
    assert {n: float(r) for n, r in returns.of_completion.items()} == {1: 1.5, 5: 2, 3: 4.25, 7: 4}
    # All tokens of a turn take its advantage.
    agent: Any = SimpleNamespace(device="cpu")
    policy = PolicyUpdate(None, None, agent, None, None)  # type: ignore[arg-type]
    policy.credit(advantage, [Row((7, 8), ((0, 1, 2),), (1.0,), (n,)) for n in expected])
    assert policy.advantage.of_completion[3].tolist() == [3.25] * 3


def test_advantages_of_turns_by_hand():
    chains = chains_of([tree([1.0, 3.0], {0: 2.0, 1: 5.0}), tree([7.0, 9.0])])
    # States: root (samples 0, 1), their children (2 and 3), the other root (4, 5).
    assert chains.parent_S == (-1, 0, 0, -1)
    assert chains.chains == ((0, 2), (1, 3), (4,), (5,))
    advantage, returns = turn_credit(chains, doubles(1, 2, 3, 4), 0.5, 0.5)
    # Sample 2: 2 − 2 = 0; sample 0: 1 + 0.5 · 2 − 1 + 0.25 · 0 = 1.
    # Sample 3: 5 − 3 = 2; sample 1: 3 + 0.5 · 3 − 1 + 0.25 · 2 = 4. The other task: 3, 5.
    torch.testing.assert_close(advantage, doubles(1, 4, 0, 2, 3, 5))
    torch.testing.assert_close(returns, doubles(2, 5, 2, 5, 7, 9))


def test_chains_of_a_root_that_ended_early_have_one_turn():
    chains = chains_of([tree([1.0, 2.0])])
    assert chains.chains == ((0,), (1,))
    assert chains.actions_S == ((0, 1),)


# --- what is around them ---------------------------------------------------------------------


def test_numbers_of_tokens_survive_another_order_of_rows():
    rows = [Row((1, 2), ((3, 4), (5,)), (1.0, 1.0), (0, 1)), Row((1,), ((6, 7, 8),), (1.0,), (2,))]
    kept = PerToken()
    kept.put(pack(rows, 0), doubles(10, 11, 12, 13, 14, 15))
    other = pack(rows[::-1], 0)
    assert other.token_ids_RL[other.action_mask_RL].tolist() == [6, 7, 8, 3, 4, 5]
    torch.testing.assert_close(kept.get(other), doubles(13, 14, 15, 10, 11, 12))
    doubled = kept.like(2 * kept.flat())
    torch.testing.assert_close(doubled.of_completion[1], doubles(24))


def test_explained_variance_and_moments_by_hand():
    returns = doubles(1, 2, 3, 4)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(doubles(7, 7, 7, 7), returns) == pytest.approx(0.0)
    # Errors −1, 0, 0, 1 have variance ½, the returns 5/4: 1 − 0.4.
    assert explained_variance(doubles(2, 2, 3, 3), returns) == pytest.approx(0.6)
    assert math.isnan(explained_variance(returns, doubles(1, 1, 1, 1)))  # nothing to explain
    assert moments(doubles(1, 3)) == (2, 2.0, 1.0)
    torch.testing.assert_close(standardized(doubles(1, 3)), doubles(-1, 1), rtol=1e-6, atol=0)


def test_minibatches_are_a_partition_that_the_key_decides():
    two, one = Deal((0, 0)), Deal((0,))
    parts = minibatches([4, 6], 4, ("a", 1), two)
    assert sorted(len(part) for part in parts) == [3, 3, 4]
    assert sorted(i for part in parts for i in part) == list(range(10))
    assert minibatches([4, 6], 4, ("a", 1), two) == parts != minibatches([4, 6], 4, ("a", 2), two)
    assert [sorted(part) for part in minibatches([3], None, ("a",), one)] == [[0, 1, 2]]
    assert minibatches([3], 100, ("a",), one) == minibatches([3], None, ("a",), one)


# --- SHPPO's latent losses -------------------------------------------------------------------


def test_latent_entropy_by_hand():
    # One state, two agents, one dimension: σ = 1 has ½ log 2πe = 1.418939, σ = e one more.
    sigma = doubles(1, math.e).view(1, 2, 1)
    assert latent_entropy(sigma).item() == pytest.approx(1.4189385 + 0.5)
    # Dimensions add up.
    assert latent_entropy(torch.ones(1, 1, 3)).item() == pytest.approx(3 * 1.4189385)


def test_latent_logprob_by_hand():
    # Two agents of two dimensions; ½ log 2π = 0.9189385 each. The first stands at its mean with
    # σ = 1 and 2: −2 · 0.9189385 − log 2; the second one and two σ off: −½ − 2 less.
    latent, mu = doubles(3, 5, 1, 4).view(1, 2, 2), doubles(3, 5, 0, 0).view(1, 2, 2)
    found = latent_logprob(latent, mu, doubles(1, 2, 1, 2).view(1, 2, 2))
    base = -2 * 0.9189385332 - math.log(2)
    torch.testing.assert_close(found, doubles(base, base - 2.5).view(1, 2))


def test_latent_distances_by_hand():
    # Three agents in the plane: (1, 0), (0, 2), (−3, 0): cosines 0, −1, 0.
    latents = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(latent_distances(latents), doubles(1, 2, 1).view(1, 3))
    assert latent_distances(latents[:, :1]).shape == (1, 0)


def test_latent_diversity_by_hand():
    distances = doubles(0.5, 1.0, 1.5, 2.0).view(2, 2)
    # (d − 0.5) / 1.5: 0, 1/3, 2/3, 1; means of the states 1/6 and 5/6
    torch.testing.assert_close(latent_diversity(distances, 0.5, 2.0), doubles(1 / 6, 5 / 6))
    # One sample of two agents, or all alike: nothing to compare, and no gradient.
    assert latent_diversity(doubles(0.7).view(1, 1), 0.7, 0.7).tolist() == [0.0]
    assert latent_diversity(torch.zeros(3, 0), 0.0, 0.0).tolist() == [0.0] * 3


def test_latent_diversity_pushes_every_distance_up():
    distances = doubles(0.5, 1.0, 2.0).view(3, 1).requires_grad_()
    latent_diversity(distances, 0.5, 2.0).sum().backward()
    torch.testing.assert_close(distances.grad, torch.full((3, 1), 1 / 1.5, dtype=torch.float64))


def test_latent_loss_by_hand():
    # −2 + 0.01 · 3 − 0.1 · 0.5 = −2.02
    loss = latent_loss(doubles(2), doubles(3), doubles(0.5), 0.01, 0.1)
    assert loss.item() == pytest.approx(-2.02)
