"""SHPPO's sampler: all agents in one batch, each under a separate latent."""

from __future__ import annotations

import pytest
import torch

from comlrl.keyed import normals
from comlrl.models.critics import observations
from comlrl.models.latent_networks import HeterogeneousPolicy
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.rollout.generation import Generator
from comlrl.rollout.latent_sampler import LatentSampler
from comlrl.types import Request, Row, Sampling
from tests.support.latents import HIDDEN, LATENT, policy
from tests.support.tiny_models import prompt, team


def requests(texts: list[str], agent: int, count: int = 2) -> list[Request]:
    return [
        Request(prompt(text), tuple((5, "train", 1, text, (), agent, g) for g in range(count)))
        for text in texts
    ]


def sampler(made: HeterogeneousPolicy, built) -> LatentSampler:
    return LatentSampler(made, Generator(built, head=made.layer))


@pytest.mark.parametrize("agents", [1, 2, 3, 4])
def test_all_agents_are_sampled_in_one_batch(agents):
    built = team("qwen2", dtype="float32", algorithm="shppo")
    made = policy()
    many = sampler(made, built)
    asked = [requests(["one", "another task"], i) for i in range(agents)]
    groups_N = many.sample(asked, Sampling(1.0, 6))
    assert many.inner.calls == 1
    assert [len(of_agent) for of_agent in groups_N] == [2] * agents
    # The same as asking each agent alone: only its own latent counts.
    for i in range(agents):
        alone = sampler(made, built).sample(
            [requests(["one", "another task"], i)], Sampling(1.0, 6)
        )
        assert [[c.token_ids for c in group] for group in alone[0]] == [
            [c.token_ids for c in group] for group in groups_N[i]
        ]


def test_a_completion_carries_the_latent_that_it_was_sampled_under():
    made, built = policy(), team("qwen2", dtype="float32", algorithm="shppo")
    asked = [requests(["task"], 0), requests(["other"], 1)]
    groups_N = sampler(made, built).sample(asked, Sampling(1.0, 4))
    for agent, (name, ((first, second),)) in enumerate(
        zip(("task", "other"), groups_N, strict=True)
    ):
        kept = first.latent
        assert second.latent is kept
        seen = observations(built.agents[0], [prompt(name)])
        mu, sigma, memory = made.encoder(seen, torch.zeros(1, HIDDEN))
        torch.testing.assert_close(
            kept.epsilon_K, normals((5, "train", 1, name, (), agent), LATENT)
        )
        torch.testing.assert_close(kept.value_K, (mu + sigma * kept.epsilon_K)[0].detach())
        torch.testing.assert_close(kept.memory_H, memory[0].detach())


def test_memory_comes_from_the_agents_own_turn_before():
    made, built = policy(), team("qwen2", dtype="float32", algorithm="shppo")
    many = sampler(made, built)
    _, ((first, _),) = many.sample([requests(["task"], 0), requests(["task"], 1)], Sampling(1.0, 4))
    later = Request(prompt("more"), ((5, "train", 1, "task", (1,), 1, 0),), before=first.latent)
    _, ((second,),) = many.sample([[], [later]], Sampling(1.0, 4))
    seen = observations(built.agents[0], [prompt("more")])
    mu, _, _ = made.encoder(seen, first.latent.memory_H[None])
    torch.testing.assert_close(second.latent.mu_K, mu[0].detach())


def test_greedy_sampling_takes_the_mean_latent():
    many = sampler(policy(), team("qwen2", dtype="float32", algorithm="shppo"))
    (((completion, _),),) = many.sample([requests(["task"], 0)], Sampling(0.0, 4))
    assert torch.equal(completion.latent.value_K, completion.latent.mu_K)


def test_sampled_and_scored_log_probabilities_agree():
    """Greedy choices under the layer are the arg max of the packed forward pass with it."""
    made, built = policy(), team("qwen2", dtype="float32", algorithm="shppo")
    many = sampler(made, built)
    ((completion,),) = many.sample([requests(["a task"], 0, count=1)], Sampling(0.0, 8))[0]
    agent, ids = built.agents[0], completion.token_ids
    batch = pack([Row(prompt("a task"), (ids,), (1.0,), (0,))], 0)
    latents = completion.latent.value_K.expand(len(ids), -1)
    with torch.no_grad():
        logprobs = action_logprobs(agent, batch, 1.0, head=made.layer, head_input_A=latents)
        best = agent.logits(made.layer(logprobs.hidden_AD, latents)).argmax(-1)
    assert best.tolist() == list(ids)
