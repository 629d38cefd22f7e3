"""What critics know of the run so far: running moments, and what they allow a critic to learn."""

from __future__ import annotations

import torch

from comlrl.models.critics import DECAY, LEAST_DEVIATION, RunningMoments, TeamCritic


def test_moments_before_the_first_step_change_nothing():
    moments = RunningMoments(2)
    moments.add(torch.zeros(0, 2))  # a step of which no process has values
    assert moments.mean.tolist() == [0, 0]
    assert moments.deviation.tolist() == [1, 1]


def test_earlier_steps_weigh_less():
    moments = RunningMoments(1)
    moments.add(torch.tensor([[1.0], [3.0]]))
    assert moments.mean.tolist() == [2]
    torch.testing.assert_close(
        moments.deviation, torch.tensor([1 + LEAST_DEVIATION**2]).double().sqrt()
    )
    moments.add(torch.tensor([[8.0]]))
    weights = torch.tensor([DECAY, 1]).double() / (1 + DECAY)
    mean, square = (weights @ torch.tensor(x).double() for x in ([2.0, 8.0], [5.0, 64.0]))
    torch.testing.assert_close(moments.mean, mean[None])
    variance = square - mean**2 + LEAST_DEVIATION**2
    torch.testing.assert_close(moments.deviation, variance.sqrt()[None])


def test_the_first_value_is_0_and_the_next_steps_the_mean_return():
    critic = TeamCritic(8)
    seen = torch.randn(4, 1, 8)
    critic.observe(seen[:, 0])
    assert critic(seen).tolist() == [0.0] * 4
    critic.returns.add(torch.tensor([[1.0], [2.0], [3.0]]))
    torch.testing.assert_close(critic(seen), torch.full((4,), 2.0))


def test_a_critic_tells_prompts_of_one_template_apart():
    """Their means have most in common, as those of a language model's states have."""
    torch.manual_seed(0)
    width, steps = 64, 40
    common, kinds = torch.randn(width), 0.05 * torch.randn(2, width)
    critic = TeamCritic(width)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    errors, spread = [], []
    for step in range(steps):
        kind = torch.randint(2, (4,))
        seen = (common + kinds[kind] + 0.02 * torch.randn(4, width))[:, None]
        returns = 2.0 + 2.0 * kind
        critic.observe(seen[:, 0])
        value = critic(seen)
        if step >= steps // 2:
            errors += (returns - value).tolist()
            spread += returns.tolist()
        for _ in range(2):
            optimizer.zero_grad()
            (critic(seen) - returns).square().mean().backward()
            optimizer.step()
        critic.returns.add(returns[:, None])
    explained = 1 - torch.tensor(errors).square().mean() / torch.tensor(spread).var()
    assert explained > 0.5
