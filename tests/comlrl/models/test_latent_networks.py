"""SHPPO's layer, encoder, inference net and sampler, each against its equation."""

from __future__ import annotations

import math

import torch

from comlrl.models.latent_networks import (
    HeterogeneousLayer,
    InferenceNet,
    LatentEncoder,
    frozen,
)
from comlrl.models.logprobs import action_logprobs
from comlrl.models.rows import pack
from comlrl.types import Row
from tests.support.latents import HIDDEN, LATENT, RANK, WIDTH, policy, saved_policy
from tests.support.tiny_models import prompt, team


def test_with_b_zero_the_policy_is_exactly_the_base():
    layer = HeterogeneousLayer(WIDTH, LATENT, RANK)
    hidden = torch.randn(6, WIDTH)
    assert torch.equal(layer(hidden, torch.randn(6, LATENT)), hidden)
    agent = team("qwen2", dtype="float32").agents[0]
    batch = pack([Row(prompt("some code"), (prompt("abc"), prompt("de")), (1.0, 1.0), (0, 1))], 0)
    with torch.no_grad():
        plain = action_logprobs(agent, batch, 1.0)
        changed = action_logprobs(
            agent, batch, 1.0, head=layer, head_input_A=torch.randn(5, LATENT)
        )
    assert torch.equal(plain.logprob_A, changed.logprob_A)


def test_the_layer_by_hand():
    layer = HeterogeneousLayer(2, 1, 1).double()
    with torch.no_grad():
        layer.A.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.B.weight.copy_(torch.tensor([[3.0], [-1.0]]))
        layer.decoder.weight.copy_(torch.tensor([[0.5], [1.0]]))
        layer.decoder.bias.copy_(torch.tensor([0.0, 0.25]))
    # l = 2: w = 1, b = 2.25; A h = 1 · 0.1 + 2 · 0.2 = 0.5; h + B tanh(0.5 + 2.25)
    inner = math.tanh(2.75)
    found = layer(torch.tensor([[0.1, 0.2]]).double(), torch.tensor([[2.0]]).double())
    expected = torch.tensor([[0.1 + 3 * inner, 0.2 - inner]]).double()
    torch.testing.assert_close(found, expected)


def test_each_row_has_its_own_layer():
    layer = policy().layer
    hidden, latent = torch.randn(5, WIDTH), torch.randn(5, LATENT)
    one_by_one = torch.cat([layer(hidden[i : i + 1], latent[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(layer(hidden, latent), one_by_one)


def test_a_narrow_dtype_stays_what_it_was():
    layer = policy().layer
    assert layer(torch.randn(2, WIDTH).bfloat16(), torch.randn(2, LATENT)).dtype == torch.bfloat16


def test_sigma_is_positive_and_observations_take_no_gradient():
    encoder = policy().encoder
    seen = (100 * torch.randn(7, WIDTH)).requires_grad_()
    mu, sigma, memory = encoder(seen, torch.zeros(7, HIDDEN))
    assert mu.shape == sigma.shape == (7, LATENT)
    assert memory.shape == (7, HIDDEN)
    assert (sigma >= 1e-5).all()
    (mu.sum() + sigma.sum()).backward()
    assert seen.grad is None


def test_latents_along_a_chain_are_the_encoder_turn_by_turn():
    encoder = policy().encoder
    seen = torch.randn(4, 2, WIDTH)
    # State 0 → 1 → 3, and state 2 alone; two agents.
    mu, sigma = encoder.along_chains(seen, (-1, 0, -1, 1))
    for agent in range(2):
        memory = torch.zeros(1, HIDDEN)
        for state in (0, 1, 3):
            m, s, memory = encoder(seen[state, agent][None], memory)
            torch.testing.assert_close(mu[state, agent], m[0])
            torch.testing.assert_close(sigma[state, agent], s[0])
        m, _, _ = encoder(seen[2, agent][None], torch.zeros(1, HIDDEN))
        torch.testing.assert_close(mu[2, agent], m[0])


def test_a_process_without_tasks_takes_part_in_the_encoders_update():
    encoder = LatentEncoder(WIDTH, HIDDEN, LATENT)
    mu, sigma = encoder.along_chains(torch.zeros(0, 2, WIDTH), [])
    assert mu.shape == sigma.shape == (0, 2, LATENT)
    (mu.sum() + sigma.sum()).backward()
    gradients = [p.grad for p in encoder.parameters() if p.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)


def test_the_last_turns_latent_teaches_the_memory():
    encoder = policy().encoder
    mu, _ = encoder.along_chains(torch.randn(2, 1, WIDTH), (-1, 0))
    mu[1].sum().backward()
    assert encoder.memory.weight_ih.grad.abs().sum() > 0


def test_the_latent_value_teaches_the_encoder_and_not_the_inference_net():
    encoder, inference = LatentEncoder(WIDTH, HIDDEN, LATENT), InferenceNet(WIDTH, HIDDEN, LATENT)
    seen = torch.randn(3, 2, WIDTH)
    with frozen(inference):
        value = inference(seen, *encoder.along_chains(seen, (-1, -1, -1)))
    (-value).sum().backward()
    gradients = {name: p.grad for name, p in encoder.named_parameters()}
    assert all(
        g is not None and g.abs().sum() > 0 for n, g in gradients.items() if "memory" not in n
    )
    assert all(p.grad is None for p in inference.parameters())
    assert all(p.requires_grad for p in inference.parameters())  # thawed again


def test_the_inference_net_is_a_mean_over_agents():
    inference = InferenceNet(WIDTH, HIDDEN, LATENT)
    seen, mu, sigma = torch.randn(3, 4, WIDTH), torch.randn(3, 4, LATENT), torch.rand(3, 4, LATENT)
    order = [3, 1, 0, 2]
    torch.testing.assert_close(
        inference(seen, mu, sigma), inference(seen[:, order], mu[:, order], sigma[:, order])
    )
    state = inference.state(seen).mean(1)
    each = [inference.value(torch.cat([state, mu[:, i], sigma[:, i]], -1))[:, 0] for i in range(4)]
    torch.testing.assert_close(inference(seen, mu, sigma), torch.stack(each).mean(0))


def test_plain_files_hold_the_whole_policy(tmp_path):
    made = policy(3)
    made.save(tmp_path)
    assert sorted(f.name for f in (tmp_path / "heterogeneous").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    again = saved_policy(tmp_path)
    assert again.sizes == made.sizes
    for name, value in made.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
