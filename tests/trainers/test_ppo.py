"""PPO and MAPPO on tiny models: ratios, credit, critics, KL, schedules, resuming, learning."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from comlrl.errors import NonFiniteError, UserError
from comlrl.loop import checkpoint
from comlrl.models.critics import LanguageCritic, TeamCritic, TokenCritic, observations
from comlrl.update import team_critics
from comlrl.update.optimizer import AgentOptimizer
from tests.support.plain_chains import chains_of
from tests.support.processes import python
from tests.support.runs import state
from tests.support.tiny_models import folder, prompt, team
from tests.support.tiny_trainers import build, grown, own_shares, rolled, share_of_letters

IPPO, MAPPO = {"critic": "independent"}, {"critic": "centralized", "granularity": "turn"}
TURN, LOSS = {"granularity": "turn"}, {"kl_in": "loss"}
SHARED, MODEL = {"shared_policy": True}, {"critic_model": "llama"}
OWN = {"own_rewards": True}  # a reward for each agent
ORDER = {"turn_order": "sequential"}
CUT = {
    "top_p": 0.9,
    "top_k": 40,
    "generation__max_support": 20,
    "entropy_coef": 0.01,
    "kl_coef": 0.1,
}
COMBINATIONS = {
    "ippo": IPPO, "ippo, kl in the loss": IPPO | LOSS, "ippo by turns": IPPO | TURN,
    "ippo by turns, kl in the loss": IPPO | TURN | LOSS, "mappo": MAPPO,
    "mappo, kl in the loss": MAPPO | LOSS, "shared ippo": IPPO | SHARED,
    "shared ippo by turns": IPPO | TURN | SHARED, "shared mappo": MAPPO | SHARED,
    "ippo by a model": IPPO | MODEL, "ippo by turns by a model": IPPO | TURN | MODEL,
    "mappo by a model": MAPPO | MODEL, "shared ippo by a model": IPPO | SHARED | MODEL,
    "shared mappo by a model": MAPPO | SHARED | LOSS | MODEL, "own rewards, ippo": IPPO | OWN,
    "own rewards, mappo": MAPPO | OWN,
    "own rewards, mappo by a model": MAPPO | MODEL | OWN, "ippo in order": IPPO | ORDER,
    "ippo by turns in order": IPPO | TURN | ORDER, "mappo in order": MAPPO | ORDER,
    "mappo in order by a model, own rewards": MAPPO | ORDER | MODEL | OWN,
}  # fmt: skip


def combination(name):
    """Its reward and keys; a language-model critic is of another family than the agents'."""
    keys = dict(COMBINATIONS[name])
    keys["value"] = own_shares if "own_rewards" in keys else share_of_letters
    return keys | ({"critic_model": str(folder("llama"))} if "critic_model" in keys else {})


def metrics_of(trainer):
    return trainer.loop.logger.metrics()


def last(trainer):
    return metrics_of(trainer)[-1]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("keys", [IPPO, MAPPO, IPPO | SHARED, IPPO | CUT], ids=str)
def test_first_ratios_are_exactly_one(kind, keys, tmp_path):
    """One epoch of one minibatch: no update lies between the old and the new pass."""
    trainer = build(
        "ppo", tmp_path, share_of_letters, kind=kind, num_agents=2, num_turns=2,
        ppo_epochs=1, max_steps=2, learning_rate=1e-2, **keys,
    )  # fmt: skip
    trainer.train()
    for metrics in trainer.loop.logger.metrics():
        assert metrics["ratio_max"] == 1.0
        assert metrics["approx_kl"] == 0.0
        assert metrics["clip_fraction"] == 0.0


def test_later_minibatches_and_epochs_leave_ratio_one(tmp_path):
    trainer = build(
        "ppo", tmp_path, share_of_letters, count=4, train_batch_size=2, ppo_epochs=3, max_steps=1,
        learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    metrics = last(trainer)
    assert metrics["ratio_max"] > 1.0
    assert metrics["approx_kl"] > 0.0
    assert metrics["ppo_epochs"] == 3
    assert trainer.loop.counters.updates == 6  # 3 epochs of 2 minibatches


def test_target_kl_ends_the_epochs(tmp_path):
    trainer = build(
        "ppo", tmp_path, share_of_letters, ppo_epochs=8, max_steps=1, learning_rate=5e-2,
        target_kl=1e-4,
    )  # fmt: skip
    trainer.train()
    # The first epoch's KL is 0 (one minibatch), the second's is above the target.
    assert last(trainer)["ppo_epochs"] == 2


def test_rollouts_are_chains_and_each_sample_is_counted(tmp_path):
    trainer = build("ppo", tmp_path, share_of_letters, num_turns=3, max_steps=1)
    trainer.train()
    # 2 tasks · 3 samples · 3 turns
    assert trainer.loop.counters.env_steps == 18
    assert trainer.rollout.reward.scored == 18


def test_the_value_heads_gradient_never_reaches_the_policy():
    hidden = torch.randn(5, 8, requires_grad=True)
    critic = TokenCritic(8)
    assert critic(hidden).tolist() == [0.0] * 5  # starts by saying 0
    torch.nn.init.ones_(critic.layers[-1].weight)
    critic(hidden).sum().backward()
    assert hidden.grad is None
    assert all(p.grad is not None for p in critic.parameters())


def test_a_team_critic_takes_any_number_of_agents_in_any_order():
    critic = TeamCritic(8)
    torch.nn.init.normal_(critic.together[-1].weight)
    seen = torch.randn(3, 4, 8)
    assert critic(seen[:, :2]).shape == critic(seen).shape == (3,)
    torch.testing.assert_close(critic(seen), critic(seen[:, [2, 0, 3, 1]]))


def test_independent_critics_read_models_of_any_width_and_a_centralized_one_does_not(tmp_path):
    models = {"agents": [str(folder("qwen2")), str(folder("qwen2 of 64"))], "num_agents": 2}
    trainer = build("ppo", tmp_path, share_of_letters, **models, **IPPO, granularity="turn")
    trainer.train()
    assert [network.observed.mean.shape for network in trainer.critics.networks] == [(32,), (64,)]
    assert all(network.observed.mean.any() for network in trainer.critics.networks)
    with pytest.raises(UserError, match=r"ppo\.critic: .*32, 64"):
        build("ppo", tmp_path / "mappo", share_of_letters, **models, **MAPPO)


def test_an_independent_critic_reads_no_prompt_of_others(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        team_critics, "observations",
        lambda agent, prompts: read.append(agent.index) or observations(agent, prompts),
    )  # fmt: skip
    keys = {"granularity": "turn", "num_agents": 2, "agents": {"aux": {"train": False}}}
    trainer = build("ppo", tmp_path, share_of_letters, **IPPO, **keys)
    trainer.credit(rolled(grown(trainer)))
    assert read == [1]


def test_observations_are_masked_means_whatever_the_batch():
    agent = team("qwen2", dtype="float64").agents[0]
    prompts = [prompt(text) for text in ("ab", "a longer prompt than that", "xyz", "ab")]
    found = observations(agent, prompts)
    for index, ids in enumerate(prompts):
        with torch.no_grad():
            alone = agent.hidden(input_ids=torch.tensor([ids]), use_cache=False)[0].mean(0)
        torch.testing.assert_close(found[index], alone.float(), rtol=1e-4, atol=1e-5)


def credited(trainer):
    """Its first step's chains, and its policies with the advantages that the trainer gives."""
    trees = grown(trainer)
    return chains_of(trees), trainer.credit(rolled(trees))


def stirred(trainer):
    """The same with policies away from their reference and critics that say more than 0."""
    torch.manual_seed(0)
    for critic in trainer.critics.networks:
        modules = critic.head if isinstance(critic, LanguageCritic) else critic
        last = [m for m in modules.modules() if isinstance(m, torch.nn.Linear)][-1]
        torch.nn.init.normal_(last.weight)
    teams = (
        [trainer.team, trainer.critics.language_team]
        if trainer.critics.language_team
        else [trainer.team]
    )
    with torch.no_grad():
        for agent in (agent for one in teams for agent in one.agents):
            for parameter in agent.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return trainer


def states(agent, prompt_ids, ids=()):
    """Last hidden states of one unpadded sequence, (tokens, width)."""
    return agent.hidden(input_ids=torch.tensor([[*prompt_ids, *ids]]), use_cache=False)[0]


def plain_logprobs(trainer, policy, prompt_ids, ids, reference=False):
    team = trainer.team
    with team.reference(policy) if reference else team.acting(policy) as agent:
        logits = agent.logits(states(agent, prompt_ids, ids)[len(prompt_ids) - 1 : -1]).double()
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def plain_values(trainer, i, turns, ids):
    """What agent i's critic says of a state: of each token of a completion, or of the turn."""
    section, agents = trainer.section, range(trainer.section.num_agents)
    centralized = section.critic == "centralized"
    policy = 0 if section.shared_policy else i
    critic = trainer.critics.networks[0 if centralized else policy]
    head = i if centralized and trainer.rollout.returns_by_agent else 0
    own = turns[i].prompt_ids
    if section.turn_order == "sequential":
        agents = range(i + 1)  # what later agents read holds what i is about to write
    read = [turns[j].prompt_ids for j in (agents if centralized else [i])]
    if isinstance(critic, LanguageCritic):
        room = (critic.agent.context_length - 1) // len(read)
        joined = tuple(token for part in read for token in part[-room:])
        with trainer.critics.language_team.acting(critic.agent.index) as agent:
            if section.granularity == "turn":
                return critic.head(states(agent, joined)[-1:].float())[:, head]
            return critic.head(states(agent, own, ids)[len(own) - 1 : -1].float())[:, 0]
    if section.granularity == "token":
        with trainer.team.acting(policy) as agent:
            return critic(states(agent, own, ids)[len(own) - 1 : -1])
    seen = []
    for j, part in zip(agents if centralized else [i], read, strict=True):
        with trainer.team.acting(0 if section.shared_policy else j) as agent:
            seen.append(states(agent, part).mean(0).float().detach())
    normed = F.layer_norm(torch.stack(seen), seen[0].shape)
    standard = ((normed - critic.observed.mean) / critic.observed.deviation).clamp(-5, 5)
    return critic.together(critic.each(standard.float()).mean(0))[None, head]


@torch.no_grad()
def plain_advantages(trainer, chains, i, values_of=None):
    """Agent i's advantages, number by number, from the equations alone; ``values_of`` takes what
    its critic is to say: R = Â + V."""
    section, expected = trainer.section, {}
    policy = 0 if section.shared_policy else i
    for chain in chains.chains:
        rewards, values, discounts, places = [], [], [], []
        for c in chain:
            turns = chains.turns_SN[chains.state_C[c]]
            g = chains.actions_S[chains.state_C[c]].index(c)

            def paid(j, turns=turns, g=g):
                of_policy = 0 if section.shared_policy else j
                turn = turns[j]
                sequence = (of_policy, turn.prompt_ids, turn.completions_G[g].token_ids)
                before = plain_logprobs(trainer, *sequence, reference=True)
                return section.kl_coef * (plain_logprobs(trainer, *sequence) - before)

            ids = turns[i].completions_G[g].token_ids
            value = plain_values(trainer, i, turns, ids).tolist()
            cost = [0.0] * len(value)
            if section.kl_in == "reward" and section.granularity == "token":
                cost = paid(i).tolist()
            elif section.kl_in == "reward":
                together = section.critic == "centralized" and not trainer.rollout.returns_by_agent
                whose = range(section.num_agents) if together else [i]
                cost = [float(sum(paid(j).sum() for j in whose))]
            places += [(c, len(ids))] * len(value)
            rewards += [-part for part in cost]
            own = trainer.rollout.returns_by_agent
            rewards[-1] += chains.own_reward_CN[c][i] if own else chains.reward_C[c]
            values += value
            discounts += [section.gamma_token] * (len(value) - 1) + [section.discount]
        following = [*values[1:], 0.0]
        deltas = [
            r + d * f - v for r, d, f, v in zip(rewards, discounts, following, values, strict=True)
        ]
        for at, (c, count) in enumerate(places):
            advantage = sum(
                math.prod(section.gae_lambda * d for d in discounts[at:end]) * deltas[end]
                for end in range(at, len(deltas))
            )
            number = c * section.num_agents + i
            by_turn = section.granularity == "turn"
            if values_of is not None:
                values_of.setdefault(number, []).append(advantage + values[at])
            expected.setdefault(number, []).extend([advantage] * (count if by_turn else 1))
    assert policy < len(trainer.team)
    return expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_credit_of_a_step_is_what_the_equations_say(name, tmp_path):
    """The trainer's advantages against a plain recomputation from the trees."""
    trainer = stirred(
        build(
            "ppo", tmp_path, num_agents=2, num_turns=2, kl_coef=0.3,
            normalize_advantages=False, gamma_token=0.9, gae_lambda=0.8, discount=0.5,
            max_new_tokens=6, agent_model__torch_dtype="float64", **combination(name),
        )
    )  # fmt: skip
    chains, policies = credited(trainer)
    found = {}
    for one in policies:
        found |= one.policy.advantage.of_completion
    expected = plain_advantages(trainer, chains, 0) | plain_advantages(trainer, chains, 1)
    assert found.keys() == expected.keys()
    for number, advantage in expected.items():
        wanted = torch.tensor(advantage).double()
        torch.testing.assert_close(found[number].double(), wanted, rtol=1e-4, atol=1e-5)


def gradients(trainer, monkeypatch):
    """Of each optimizer's only update in a step of one epoch, which then is not made."""
    found = {}

    def taken(optimizer, progress):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in optimizer.parameters]
        found[id(optimizer)] = torch.cat([grad.flatten().double() for grad in grads])
        return 1.0

    with monkeypatch.context() as patched:
        patched.setattr(AgentOptimizer, "step", taken)
        step = rolled(grown(trainer))
        trainer.learn(step, trainer.credit(step))
    return found


def plain_losses(trainer, chains):
    """Those of each policy and critic, one unpadded completion at a time, as their equations say.
    At the first update ρ = 1, so that ∇ρ Â = Â ∇log π."""
    section, team = trainer.section, trainer.section.num_agents
    of_policies, of_critics = {}, {}
    for i in range(team):
        returns = {}
        advantages = plain_advantages(trainer, chains, i, returns)
        policy = 0 if section.shared_policy else i
        critic = 0 if section.critic == "centralized" else policy
        places = zip(chains.turns_SN, chains.turn_S, chains.actions_S, strict=True)
        for turns, at, actions in places:
            turn = turns[i]
            for c, completion in zip(actions, turn.completions_G, strict=True):
                sequence = (policy, turn.prompt_ids, completion.token_ids)
                logprob = plain_logprobs(trainer, *sequence)
                loss = -(torch.tensor(advantages[c * team + i]) * logprob)
                loss = loss * section.weight_T[at - 1]
                if section.kl_in == "loss":
                    with torch.no_grad():
                        ratio = plain_logprobs(trainer, *sequence, reference=True)
                    ratio = ratio - logprob
                    loss = loss + section.kl_coef * (ratio.exp() - ratio - 1)
                of_policies.setdefault(policy, []).append(loss)
                value = plain_values(trainer, i, turns, completion.token_ids)
                wanted = torch.tensor(returns[c * team + i])
                of_critics.setdefault(critic, []).append(0.5 * (value - wanted) ** 2)
    return [{k: torch.cat(v).mean() for k, v in of.items()} for of in (of_policies, of_critics)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_gradients_are_those_of_single_losses(name, tmp_path, monkeypatch):
    trainer = stirred(
        build(
            "ppo", tmp_path, num_agents=2, num_turns=2, kl_coef=0.3, ppo_epochs=1,
            normalize_advantages=False, gamma_token=0.9, gae_lambda=0.8, discount=0.5,
            max_new_tokens=6, turn_gradient_weights=[1.2, 0.8], value_clip_range=None,
            agent_model__torch_dtype="float64", **combination(name),
        )
    )  # fmt: skip
    found = gradients(trainer, monkeypatch)
    both = zip((trainer.optimizers, trainer.critics.optimizers),
               plain_losses(trainer, chains_of(grown(trainer))), strict=True)  # fmt: skip
    for optimizers, losses in both:
        assert losses.keys() == set(range(len(optimizers)))
        for index, loss in losses.items():
            parameters = optimizers[index].parameters
            grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            expected = torch.cat(
                [
                    (torch.zeros_like(p) if g is None else g).flatten().double()
                    for p, g in zip(parameters, grads, strict=True)
                ]
            )
            assert expected.norm() > 0
            difference = (found[id(optimizers[index])] - expected).norm() / expected.norm()
            assert difference < 1e-4, (name, index)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_critic_without_numbers_stops_the_run_and_is_named(name, tmp_path):
    """Before anything learns from it; and where its own loss is none, with what gave it."""
    keys = {"num_agents": 2, "num_turns": 2, "max_new_tokens": 6} | combination(name)
    trainer = build("ppo", tmp_path, **keys)
    trained = [p for agent in trainer.team.agents for p in agent.parameters()]
    before = [p.detach().clone() for p in trained]
    critic = trainer.critics.networks[-1]
    head = critic.head if isinstance(critic, LanguageCritic) else critic
    torch.nn.init.constant_(list(head.parameters())[-1], math.nan)
    with pytest.raises(NonFiniteError, match="value_learning_rate"):
        trainer.train()
    for one, other in zip(before, trained, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["mappo", "mappo by a model", "ippo by turns"])
def test_a_critic_that_flies_off_stops_the_run(name, tmp_path):
    trainer = build(
        "ppo", tmp_path, num_agents=2, max_new_tokens=6, max_steps=4,
        value_learning_rate=1e30, value_clip_range=None, train_batch_size=1, **combination(name),
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="value_learning_rate"):
        trainer.train()


def test_kl_coef_goes_to_its_target(tmp_path):
    trainer = build("ppo", tmp_path, share_of_letters, kl_coef=0.5, kl_target=0.1, kl_horizon=10)
    trainer.kl.adapt(0.11, 5)  # error 0.1: 0.5 · (1 + 0.1 · 5 / 10)
    assert trainer.kl.value == pytest.approx(0.5 * 1.05)
    trainer.kl.adapt(9.0, 5)  # clipped to 0.2
    assert trainer.kl.value == pytest.approx(0.5 * 1.05 * 1.1)
    trainer.kl.adapt(0.0, 10)  # clipped to −0.2
    assert trainer.kl.value == pytest.approx(0.5 * 1.05 * 1.1 * 0.8)
    trainer.kl.adapt(0.0, 64)  # a step beyond the horizon counts as one of 10
    assert trainer.kl.value == pytest.approx(0.5 * 1.05 * 1.1 * 0.8 * 0.8)


@pytest.mark.parametrize("algorithm", ["ppo", "shppo"])
def test_the_entropy_bonus_keeps_the_policy_open(algorithm, tmp_path):
    """Nothing is rewarded but entropy, which is at most log 300 = 5.70."""
    trainer = build(
        algorithm, tmp_path, lambda texts: 0.0, entropy_coef=1.0, max_steps=6, learning_rate=1e-2,
        normalize_advantages=False, value_learning_rate=1e-6,
    )  # fmt: skip
    trainer.train()
    entropy = [metrics["entropy"] for metrics in trainer.loop.logger.metrics()]
    assert entropy[0] + 0.3 < entropy[-1] <= 5.71


@pytest.mark.sample(1)
@pytest.mark.parametrize("keys", [IPPO, MAPPO, MAPPO | LOSS, IPPO | TURN], ids=str)
def test_the_kl_leads_back_to_the_reference(keys, tmp_path):
    """Nothing else is rewarded, and the policy starts away from the base."""
    trainer = build(
        "ppo", tmp_path, lambda texts: 0.0, kl_coef=1.0, max_steps=8, ppo_epochs=3,
        learning_rate=3e-3, num_generations=48, max_new_tokens=8, value_learning_rate=1e-2,
        value_clip_range=None, normalize_advantages=False, **keys,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.team.agents[0].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    trainer.train()
    # Of a whole completion: a policy may also pay less by saying less.
    kl = [m["kl"] * m["completion_length_mean"] for m in trainer.loop.logger.metrics()]
    assert kl[-1] < 0.75 * kl[0]


def rates(trainer, monkeypatch) -> list[list[float]]:
    """The learning rate of each update of each optimizer, the largest being 1."""
    found: dict[int, list[float]] = {}
    step = AgentOptimizer.step

    def watched(optimizer, progress):
        norm = step(optimizer, progress)
        of_optimizer = found.setdefault(id(optimizer), [])
        of_optimizer.append(optimizer.adam.param_groups[0]["lr"] / optimizer.peak)
        return norm

    monkeypatch.setattr(AgentOptimizer, "step", watched)
    trainer.train()
    return list(found.values())


def falling(count: int) -> list[float]:
    return [1 - k / count for k in range(count)]


@pytest.mark.parametrize(
    "ends",
    [
        {"max_steps": 3},
        {"num_train_epochs": 3, "max_steps": None},  # both tasks in a step
        {"max_env_steps": 18, "max_steps": None},  # 2 tasks · 3 samples a step
        {"max_steps": 3, "num_train_epochs": 9, "max_env_steps": 1000},
    ],
    ids=str,
)
def test_the_learning_rate_falls_evenly_whatever_ends_the_run(ends, tmp_path, monkeypatch):
    """3 steps of 2 updates: 1, 5/6, …, 1/6, for each agent."""
    trainer = build(
        "magrpo", tmp_path, share_of_letters, lr_scheduler="linear", train_batch_size=1, **ends
    )  # fmt: skip
    assert trainer.loop.counters.updates == 0
    assert rates(trainer, monkeypatch) == [pytest.approx(falling(6))] * 2
    assert trainer.loop.counters.updates == 6
    # The log has that of the update just made: the second, the fourth, the sixth.
    logged = [m["learning_rate"] / trainer.section.learning_rate for m in metrics_of(trainer)]
    assert logged == pytest.approx([5 / 6, 3 / 6, 1 / 6])


def test_the_last_step_may_pass_the_environment_steps(tmp_path, monkeypatch):
    # Steps of 6 in a run of 15: they begin at 0, 6/15 and 12/15, and the last is cut at 1.
    trainer = build(
        "magrpo", tmp_path, share_of_letters, lr_scheduler="linear", train_batch_size=1,
        max_steps=None, max_env_steps=15,
    )  # fmt: skip
    assert rates(trainer, monkeypatch)[0] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.1])
    assert trainer.loop.counters.env_steps == 18


def test_warm_up_counts_updates_and_the_schedule_begins_behind_it(tmp_path, monkeypatch):
    trainer = build(
        "magrpo", tmp_path, share_of_letters, lr_scheduler="linear", train_batch_size=1,
        max_steps=3, warmup_steps=2,
    )  # fmt: skip
    # 1/2 and 2/2, then from 1 at the third of six updates: four quarters are left.
    assert rates(trainer, monkeypatch)[0] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("keys", [IPPO, MAPPO], ids=str)
def test_epochs_and_minibatches_share_a_steps_progress(keys, tmp_path, monkeypatch):
    trainer = build(
        "ppo", tmp_path, share_of_letters, lr_scheduler="cosine", train_batch_size=1, max_steps=2,
        ppo_epochs=3, **keys,
    )  # fmt: skip
    # 2 steps · 3 epochs · 2 minibatches, of the policy and of the critic.
    expected = [0.5 * (1 + math.cos(math.pi * k / 12)) for k in range(12)]
    assert rates(trainer, monkeypatch) == [pytest.approx(expected)] * 2


def test_an_epoch_that_is_left_out_takes_its_part_of_the_schedule(tmp_path, monkeypatch):
    trainer = build(
        "ppo", tmp_path, share_of_letters, lr_scheduler="linear", max_steps=2, ppo_epochs=8,
        learning_rate=5e-2, target_kl=1e-4,
    )  # fmt: skip
    # Of 8 epochs a step makes 2 (the second's KL is above the target); the next begins half-way.
    assert rates(trainer, monkeypatch)[0] == pytest.approx([1.0, 15 / 16, 8 / 16, 7 / 16])


def test_every_optimizer_of_shppo_comes_to_the_end(tmp_path, monkeypatch):
    trainer = build(
        "shppo", tmp_path, share_of_letters, lr_scheduler="linear", train_batch_size=1,
        max_steps=2, ppo_epochs=2,
    )  # fmt: skip
    # Actor and critic: 2 minibatches in each of 2 · 2 epochs; encoder and inference net: 1.
    expected = [pytest.approx(falling(count)) for count in (8, 8, 4, 4)]
    assert rates(trainer, monkeypatch) == expected


RESUMED = ["ippo", "mappo", "ippo by turns", "shared mappo by a model", "ippo by a model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("magrpo", {}), ("magrpo", {"update_epochs": 2}), ("shppo", {"ppo_epochs": 2}),
        *(("ppo", {"ppo_epochs": 2, "name": name}) for name in RESUMED[:3]),
        *(
            pytest.param("ppo", {"ppo_epochs": 2, "name": name}, marks=pytest.mark.slow)
            for name in RESUMED[3:]
        ),
    ],
)  # fmt: skip
def test_a_resumed_run_goes_on_to_the_same_bits(algorithm, more, tmp_path, monkeypatch):
    keys = {
        "num_agents": 2, "num_turns": 2, "learning_rate": 1e-2, "kl_coef": 0.1, "save_steps": 2,
        "max_steps": 4, "lr_scheduler": "linear", "warmup_steps": 3, "train_batch_size": 2,
    }  # fmt: skip
    keys |= more
    if algorithm == "ppo":
        keys |= {"kl_target": 0.01, "kl_horizon": 10} | combination(keys.pop("name"))
    value = keys.pop("value", share_of_letters)
    whole = build(algorithm, tmp_path / "whole", value, **keys)
    whole.train()
    first = build(algorithm, tmp_path / "parts", value, **keys)
    steps = itertools.islice(first.loop.steps(first), 3)  # asked for a third, it saves the second
    monkeypatch.setattr(first.loop, "steps", lambda *_: itertools.islice(steps, 2))
    first.train()
    next(steps)
    second = build(algorithm, tmp_path / "parts", value, **keys)
    found = checkpoint.read(checkpoint.newest(tmp_path / "parts"))
    second.loop.resume(found, second)
    second.loop.logger.begin(second.loop.mark)
    second.train()
    expected, got = state(whole), state(second)
    assert expected.keys() == got.keys()
    for part, tensors in expected.items():
        assert tensors.keys() == got[part].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, got[part][name]), (part, name)
    if algorithm == "ppo":
        assert second.kl.value == whole.kl.value != 0.1  # it was led somewhere
    if algorithm == "shppo":
        lines = [(tmp_path / part / "latents.jsonl").read_text() for part in ("whole", "parts")]
        assert lines[0] == lines[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["ippo", "ippo by turns", "mappo", "shared mappo",
                                  "ippo by a model", "mappo by a model"])  # fmt: skip
def test_a_team_learns(name, tmp_path):
    trainer = build(
        "ppo", tmp_path, num_agents=2, max_steps=15, num_generations=16,
        learning_rate=2e-2, ppo_epochs=2, max_new_tokens=8, value_learning_rate=1e-2,
        value_clip_range=None, **combination(name),
    )  # fmt: skip
    trainer.train()
    rewards = [metrics["reward_mean"] for metrics in trainer.loop.logger.metrics()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "line"),
    [
        (["train_ppo.py", "--num_steps", "1e6", "--lora_rank", "8"], "1,000,000"),
        pytest.param(
            ["train_shppo.py", "--num_steps", "2e6", "--num_agents", "3"],
            "3 agents",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_older_flags_work_as_written(script, line, tmp_path):
    flags = ["--base_model", "qwen", "--learning_rate", "1e-5", "--save_dir", str(tmp_path)]
    output = python(*script, *flags, "--dry-run").stdout
    assert "Qwen/Qwen2.5-Coder-1.5B" in output
    assert line in output


def test_a_resumed_critic_has_the_micro_batches_that_it_was_left_with(tmp_path):
    keys = {"max_steps": 2, "save_steps": 1} | combination("mappo by a model")
    first = build("ppo", tmp_path, **keys)
    (critic,) = [part for part in first.parts().values() if isinstance(part, LanguageCritic)]
    critic.agent.micro_batch_tokens = 77  # memory has run out
    first.train()
    second = build("ppo", tmp_path, **keys)
    second.loop.resume(checkpoint.read(checkpoint.newest(tmp_path)), second)
    (critic,) = [part for part in second.parts().values() if isinstance(part, LanguageCritic)]
    assert critic.agent.micro_batch_tokens == 77
