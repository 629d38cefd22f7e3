"""The game in which the encoder's true gradient is known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.latent_gradients import PAYOFF_KAA, WAYS, Players, learn, tasks


def test_the_expected_payoff_is_what_sampled_actions_earn():
    torch.manual_seed(0)
    players, (seen, kind) = Players(), tasks(4)
    torch.nn.init.normal_(players.networks.layer.B.weight)
    with torch.no_grad():
        mu, sigma = players.latents(seen)
        draws = 5000
        drawn = mu.repeat(draws, 1, 1) + sigma.repeat(draws, 1, 1) * torch.randn(4 * draws, 2, 4)
        actions = torch.multinomial(players.logprob(drawn).exp().flatten(0, 1), 1).view(-1, 2)
        paid = PAYOFF_KAA[kind.repeat(draws), actions[:, 0], actions[:, 1]]
        # 20,000 payoffs between 0 and 4: a standard error below 0.015
        assert float(players.expected(seen, kind, 2000)) == pytest.approx(
            float(paid.mean()), abs=0.06
        )


@pytest.mark.parametrize("name", WAYS)
def test_every_way_runs_and_repeats_itself(name):
    cosine, end = learn(WAYS[name], 1, 2)
    assert (cosine, end) == learn(WAYS[name], 1, 2)
    assert -1 <= cosine <= 1 and 0 < end < 4
