"""SHPPO's trainer on tiny models: ratios, who is taught by what, any number of agents, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from comlrl.processes.statistics import Sums
from comlrl.trainers.launch.wiring.assembly import saver
from comlrl.update.losses import latent_logprob
from comlrl.update.policy_update import PolicyUpdate
from tests.support.latents import saved_policy
from tests.support.plain_chains import chains_of
from tests.support.runs import state
from tests.support.tiny_models import folder
from tests.support.tiny_trainers import build, grown, rolled, share_of_letters


def last(trainer):
    return trainer.loop.logger.metrics()[-1]


def samples_of(trainer):
    return trainer.credit(rolled(grown(trainer)))


def measured(trainer, samples):
    """The policy of a step, which knows its old log-probabilities, and all of the step's rows."""
    rows_S = samples.decisions.rows(range(2), trainer.section.weight_T)
    rows = [row for rows in rows_S for row in rows]
    policy = PolicyUpdate(
        trainer.section, trainer.team, trainer.agent,
        lambda batch: trainer._logprobs(trainer.agent, trainer.policy.layer, samples, batch),
        lambda start, batch: trainer._logprobs(start, trainer.start_layer, samples, batch),
    )  # fmt: skip
    policy.measure([rows])
    policy.credit(trainer._advantages(samples), rows)
    return policy, rows


def trained_by(trainer, update):
    """Which networks an update moved, and which got a gradient."""
    parts = {
        "lora": trainer.agent.parameters(),
        "layer": list(trainer.policy.layer.parameters()),
        "encoder": list(trainer.policy.encoder.parameters()),
        "critic": list(trainer.critic.parameters()),
        "inference": list(trainer.inference.parameters()),
    }
    before = {name: [p.detach().clone() for p in part] for name, part in parts.items()}
    for part in parts.values():
        for parameter in part:
            parameter.grad = None
    update()
    return {
        name
        for name, part in parts.items()
        if any(
            p.grad is not None or not torch.equal(p, old)
            for p, old in zip(part, before[name], strict=True)
        )
    }


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
@pytest.mark.parametrize("keys", [{}, {"top_p": 0.8}], ids=str)
def test_first_ratios_are_exactly_one(kind, keys, tmp_path):
    trainer = build(
        "shppo", tmp_path, share_of_letters, kind=kind, num_agents=3, num_turns=2, ppo_epochs=1,
        max_steps=2, learning_rate=1e-2, latent_learning_rate=1e-2, **keys,
    )  # fmt: skip
    trainer.train()
    for metrics in trainer.loop.logger.metrics():
        assert metrics["ratio_max"] == 1.0
        assert metrics["approx_kl"] == 0.0


def test_ratios_use_the_stored_latents_whatever_becomes_of_the_encoder(tmp_path):
    """No actor update, many of the encoder's: with fresh latents the ratios would leave 1."""
    trainer = build("shppo", tmp_path, share_of_letters, latent_learning_rate=0.5)
    torch.nn.init.normal_(trainer.policy.layer.B.weight)
    samples = samples_of(trainer)
    policy, rows = measured(trainer, samples)
    for _ in range(3):
        trainer.update_encoder(samples, 0.0)
    again = samples_of(trainer)
    assert not torch.allclose(again.latent_SNK, samples.latent_SNK, atol=0.1)
    old = policy.old.flat()
    policy.measure([rows])
    assert torch.equal(policy.old.flat(), old)


def test_each_loss_teaches_its_own_networks(tmp_path):
    trainer = build("shppo", tmp_path, share_of_letters)
    torch.nn.init.normal_(trainer.policy.layer.B.weight)
    samples = samples_of(trainer)
    policy, rows = measured(trainer, samples)
    actor = [trainer.optimizers["actor"]]
    updates = {
        ("lora", "layer"): lambda: policy.update(rows, actor, Sums(), 0.0),
        ("critic",): lambda: samples.values.descend(trainer.optimizers["critic"], [0, 1], 0.0),
        ("encoder",): lambda: trainer.update_encoder(samples, 0.0),
        ("inference",): lambda: trainer.update_inference(samples, 0.0),
    }
    for networks, update in updates.items():
        assert trained_by(trainer, update) == set(networks)


def test_the_latent_loss_is_its_equation(tmp_path):
    trainer = build(
        "shppo", tmp_path, share_of_letters, count=3, lambda_e=0.3, lambda_d=0.7, num_agents=2
    )
    samples = samples_of(trainer)
    with torch.no_grad():
        mu, sigma = trainer.policy.encoder.along_chains(samples.observation_SND, (-1, -1, -1))
        value = trainer.inference(samples.observation_SND, mu, sigma)
    metrics = trainer.update_encoder(samples, 0.0)
    latents = (mu + sigma * samples.epsilon_SNK).tolist()
    distances = []
    for first, second in latents:
        dot = sum(a * b for a, b in zip(first, second, strict=True))
        distances.append(1 - dot / math.hypot(*first) / math.hypot(*second))
    low, high = min(distances), max(distances)
    l_d = sum((d - low) / (high - low) for d in distances) / 3
    l_e = sum(
        sum(0.5 * math.log(2 * math.pi * math.e * s * s) for s in agent)
        for state in sigma.tolist()
        for agent in state
    ) / (3 * 2)
    l_v = float(value.mean())
    assert metrics["latent/distance"] == pytest.approx(l_d, abs=1e-5)
    assert metrics["latent/entropy"] == pytest.approx(l_e, abs=1e-5)
    assert metrics["latent/value"] == pytest.approx(l_v, abs=1e-5)
    assert metrics["latent/loss"] == pytest.approx(-l_v + 0.3 * l_e - 0.7 * l_d, abs=1e-5)


@pytest.mark.parametrize("turn_order", ["simultaneous", "sequential"])
def test_the_policy_gradient_of_latents_is_its_equation(turn_order, tmp_path):
    """Two turns, in which a state of the first has three joint actions, of the second one."""
    trainer = build(
        "shppo", tmp_path, share_of_letters, count=3, num_turns=2, latent_gradient="policy",
        lambda_e=0.3, lambda_d=0.7, turn_order=turn_order,
    )  # fmt: skip
    samples = samples_of(trainer)
    encoder = trainer.policy.encoder
    entered = {}
    trainer.optimizers["encoder"].step = lambda progress: entered.update(
        (name, p.grad.clone()) for name, p in encoder.named_parameters()
    )
    moved = trained_by(trainer, lambda: trainer.update_encoder(samples, 0.0))
    assert moved == {"encoder"}
    metrics = trainer.update_encoder(samples, 0.0)
    assert "latent/value" not in metrics

    for parameter in encoder.parameters():
        parameter.grad = None
    mu, sigma = encoder.along_chains(samples.observation_SND, samples.parent_S)
    loss, states, agents = 0, *samples.latent_SNK.shape[:2]
    for number, s in enumerate(samples.state_C):
        for i in range(agents):
            drawn = torch.distributions.Normal(mu[s, i], sigma[s, i])
            score = drawn.log_prob(samples.latent_SNK[s, i]).sum()
            gain = float(samples.advantage_CV[number, i if turn_order == "sequential" else 0])
            loss = loss - gain * score / agents / len(samples.state_C)
    distances = []
    for s in range(states):
        first, second = mu[s] + sigma[s] * samples.epsilon_SNK[s]
        distances.append(1 - torch.dot(first, second) / first.norm() / second.norm())
    low, high = (float(end(torch.stack(distances).detach())) for end in (torch.min, torch.max))
    loss = loss - 0.7 * sum((d - low) / (high - low) for d in distances) / states
    loss = loss + 0.3 * torch.distributions.Normal(mu, sigma).entropy().sum() / (states * agents)
    loss.backward()
    for name, parameter in encoder.named_parameters():
        torch.testing.assert_close(entered[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert any(grad.abs().sum() > 0 for grad in entered.values())


def test_drawn_latents_move_towards_what_earns_and_no_further_than_the_clip(tmp_path):
    """The latents of the first state earn 1, those of the other nothing."""
    trainer = build(
        "shppo", tmp_path, share_of_letters, latent_gradient="policy", lambda_e=0.0, lambda_d=0.0,
        latent_learning_rate=2e-4,
    )  # fmt: skip
    samples = samples_of(trainer)
    gain_C = torch.tensor([float(state == 0) for state in samples.state_C])
    samples = replace(samples, advantage_CV=gain_C[:, None])

    def likelihoods():
        encoder = trainer.policy.encoder
        with torch.no_grad():
            mu, sigma = encoder.along_chains(samples.observation_SND, samples.parent_S)
        return latent_logprob(samples.latent_SNK, mu, sigma)[0]

    before = likelihoods()
    for _ in range(40):
        trainer.update_encoder(samples, 0.0)
    gained = likelihoods() - before
    assert (gained > math.log(1.2)).all()  # each agent's passes the clip, and then has no gradient
    for parameter in trainer.policy.encoder.parameters():
        parameter.grad = None
    trainer.optimizers["encoder"].step = lambda progress: None
    trainer.update_encoder(samples, 0.0)
    assert all(p.grad is None or not p.grad.any() for p in trainer.policy.encoder.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("latents", ["zero", "sampled"])
def test_latents_that_are_not_learned(latents, tmp_path):
    """The encoder stays as it was; l_i is 0, or standard normal and of each state and agent."""
    trainer = build(
        "shppo", tmp_path, share_of_letters, max_steps=2, num_agents=3, num_turns=2, count=6,
        latents=latents, latent_hidden=4, latent_dim=16,
    )  # fmt: skip
    samples = samples_of(trainer)
    drawn = samples.latent_SNK.flatten()
    if latents == "zero":
        assert not drawn.any()
    else:
        assert len(drawn.unique()) == len(drawn) == 24 * 3 * 16
        assert drawn.mean().abs() < 0.1 and abs(drawn.std() - 1) < 0.1
    moved = trained_by(trainer, trainer.train)
    assert moved == {"lora", "layer", "critic"}
    assert not {"latent/loss", "inference_loss", "latent/cosine_distance"} & last(trainer).keys()
    saver(trainer.team, trainer.rollout.sampler)(tmp_path / "final_model")
    assert saved_policy(tmp_path / "final_model").latents == latents


def test_what_is_kept_is_the_rollouts(tmp_path):
    trainer = build("shppo", tmp_path, share_of_letters, num_turns=2)
    samples = samples_of(trainer)
    torch.testing.assert_close(
        samples.latent_SNK, samples.mu_SNK + samples.sigma_SNK * samples.epsilon_SNK
    )
    assert samples.parent_S.count(-1) == 2  # 2 tasks, each with 3 samples that are continued
    assert len(samples.parent_S) == 8


def test_two_agents_are_trained_and_any_number_evaluated(tmp_path):
    """The same weights, and no more of them."""
    trainer = build(
        "shppo", tmp_path, share_of_letters, max_steps=2, learning_rate=1e-2, num_turns=2
    )
    trainer.train()
    trained = state(trainer)
    counts = {}
    for agents in (1, 2, 3, 4):
        other = build("shppo", tmp_path, share_of_letters, num_agents=agents, num_turns=2)
        assert len(other.team) == 1
        other.team.load_tensors(trained)
        other.policy.load_state_dict(trained["heterogeneous"])
        trees = grown(other, "eval")
        assert all(len(node.agents_N) == agents for tree in trees for node in tree.nodes)
        counts[agents] = sum(
            p.numel()
            for p in [
                *other.agent.parameters(),
                *other.policy.parameters(),
                *other.critic.parameters(),
            ]
        )
    assert len(set(counts.values())) == 1


def test_plain_files_and_the_adapter_by_peft_alone(tmp_path):
    trainer = build("shppo", tmp_path, share_of_letters, max_steps=2, learning_rate=1e-2)
    trainer.train()
    saver(trainer.team, trainer.rollout.sampler)(tmp_path / "final_model")
    assert sorted(f.name for f in (tmp_path / "final_model").iterdir() if f.is_dir()) == [
        "agent_0",
        "heterogeneous",
    ]
    base = AutoModelForCausalLM.from_pretrained(folder("qwen2"))
    alone = PeftModel.from_pretrained(base, str(tmp_path / "final_model" / "agent_0")).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        ours = trainer.agent.model(ids).logits
        torch.testing.assert_close(alone(ids).logits, ours, rtol=1e-4, atol=1e-5)
    again = saved_policy(tmp_path / "final_model")
    for name, value in trainer.policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_the_latents_of_every_role_are_written_down(tmp_path):
    trainer = build("shppo", tmp_path, share_of_letters, num_agents=3, num_turns=2, max_steps=2)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "latents.jsonl").read_text().splitlines()]
    # 2 steps · (2 roots + 6 later states) · 3 agents
    assert len(lines) == 2 * 8 * 3
    assert {line["role"] for line in lines} == {"aux", "aux2", "main"}
    assert {line["turn"] for line in lines} == {1, 2}
    # 2 tasks · 3 samples · 2 turns are 12 joint actions a step
    assert [line["step"] for line in lines] == [12] * 24 + [24] * 24
    assert all(len(line["mu"]) == 8 for line in lines)


def test_one_agent_has_no_distance(tmp_path):
    trainer = build("shppo", tmp_path, share_of_letters, num_agents=1, max_steps=2)
    trainer.train()
    assert last(trainer)["latent/distance"] == 0.0
    assert "latent/cosine_distance" not in last(trainer)


def test_the_encoder_parts_the_agents(tmp_path):
    """L_d alone: latents that began alike point apart."""
    trainer = build(
        "shppo", tmp_path, lambda texts: 0.0, max_steps=12, ppo_epochs=4, lambda_d=1.0,
        latent_learning_rate=1e-2, count=4,
    )  # fmt: skip
    trainer.train()
    distances = [m["latent/cosine_distance"] for m in trainer.loop.logger.metrics()]
    assert distances[-1] > distances[0] + 0.3


def test_roles_come_apart_where_the_reward_asks_for_it(tmp_path):
    """One policy, two roles: the reward wants capitals of the first agent and none of the second.

    A policy without latents would have to tell the agents apart by their prompts alone.
    """

    def value(texts):
        return share_of_letters(texts[:1]) + (1 - share_of_letters(texts[1:]))

    trainer = build(
        "shppo", tmp_path, value, max_steps=15, num_generations=24, learning_rate=1e-2,
        ppo_epochs=4, max_new_tokens=6, value_learning_rate=1e-2, value_clip_range=None,
    )  # fmt: skip
    trainer.train()
    rewards = [m["reward_mean"] for m in trainer.loop.logger.metrics()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.4


def stirred_values(trainer):
    """A critic and an inference net that say more than 0."""
    torch.manual_seed(3)
    for network in (trainer.critic, trainer.inference):
        for module in network.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight)
    return trainer


def test_agents_in_order_are_credited_by_what_each_has_read(tmp_path):
    """Agent i's value, return and inference read the prompts and latents up to its own."""
    trainer = stirred_values(
        build(
            "shppo", tmp_path, share_of_letters, count=3, num_turns=2, turn_order="sequential",
            discount=0.5, gae_lambda=0.8,
        )
    )  # fmt: skip
    samples = samples_of(trainer)
    chains, seen = chains_of(grown(trainer)), samples.observation_SND
    assert chains.states_B == (6, 6, 6) and len(chains.reward_C) == 18
    with torch.no_grad():
        inferred = trainer._inferred(samples, samples.mu_SNK, samples.sigma_SNK)
        for i in range(2):
            latents = samples.mu_SNK[:, : i + 1], samples.sigma_SNK[:, : i + 1]
            torch.testing.assert_close(
                inferred[:, i], trainer.inference(seen[:, : i + 1], *latents)
            )
            value = trainer.critic(seen[:, : i + 1])
            found = torch.stack([samples.values.value.of_completion[c * 2 + i] for c in range(18)])
            torch.testing.assert_close(found[:, 0], value)
            for first, second in chains.chains:
                last = chains.reward_C[second] - value[second]
                delta = chains.reward_C[first] + 0.5 * value[second] - value[first]
                expected = torch.stack([delta + 0.5 * 0.8 * last, last])
                torch.testing.assert_close(samples.advantage_CV[[first, second], i], expected)
    # The siblings of a task have one prompt for the first agent, and one each for the second.
    assert torch.equal(seen[0, 0], seen[1, 0]) and not torch.equal(seen[0, 1], seen[1, 1])
    (policy, rows), number = measured(trainer, samples), 5
    policy.credit(trainer._advantages(samples), rows)
    for i in range(2):
        own = policy.advantage.of_completion[number * 2 + i]
        assert own.unique().tolist() == [float(samples.advantage_CV[number, i])]


def test_a_later_agents_value_is_no_gradient_of_an_earlier_latent(tmp_path):
    trainer = stirred_values(build("shppo", tmp_path, share_of_letters, turn_order="sequential"))
    samples = samples_of(trainer)
    mu, sigma = (x.clone().requires_grad_() for x in (samples.mu_SNK, samples.sigma_SNK))
    inferred = trainer._inferred(samples, mu, sigma)
    for i in range(2):
        (grad,) = torch.autograd.grad(inferred[:, i].sum(), mu, retain_graph=True)
        assert [bool(grad[:, j].any()) for j in range(2)] == [j == i for j in range(2)]


def test_agents_in_order_learn(tmp_path):
    trainer = build(
        "shppo", tmp_path, share_of_letters, turn_order="sequential", num_turns=2, ppo_epochs=1,
        max_steps=2, train_batch_size=4, eval_interval=0,
    )  # fmt: skip
    trainer.train()
    assert all(math.isfinite(last(trainer)[name]) for name in ("loss", "value_loss", "latent/loss"))
    assert trainer.loop.counters.env_steps == 2 * 2 * 3 * 2  # steps, tasks, samples, turns
