"""SHPPO: scalable heterogeneous PPO (arXiv 2404.03869), adapted to language agents.

All agents share one policy (base and one LoRA adapter). Agent i's latent l_i = μ_i + σ_i ε_i is
computed from its current and past observations, and generates its layer before the language-model
head (``comlrl/models/latent_networks.py``). V(s_t) is the team's value of pooled observations, with
GAE over turns. Each epoch minimizes, in this order:

    actor {LoRA, A, B, decoder}:  −mean_a w_t min(ρ_a Â_t, clip(ρ_a, 1 ± ε) Â_t) − c_H · mean_a H_a
    critic {V}:                   ½ max((V − R)², (clip(V, V_old ± ε_v) − R)²)
    encoder {projection, GRU, LatentNet}:  L_latent = −L_v + λ_e L_e − λ_d L_d
    inference {V_I}:              (V_I(s, {μ_i, σ_i}) − R)²

With ``latent_gradient: policy`` there is no V_I; the encoder is trained as a policy whose actions
are its latents, with r_i = N(l_i; μ_i, σ_i) / N(l_i; μ_i, σ_i of the rollout). In the first pass
r_i = 1 (REINFORCE on l_i):

    L_latent = −mean_c mean_i min(r_i Â_c, clip(r_i, 1 ± ε) Â_c) + λ_e L_e − λ_d L_d

With ``latents`` zero or sampled, l_i is 0 or ~ N(0, 1), and neither the encoder nor V_I is trained.

A turn's Â applies to every token of every agent in it; the ratio is per token. o_i, ε_i and l_i are
stored during the rollout: all ratios use the stored l_i, so they change with the policy only; just
L_latent recomputes μ and σ, with the stored ε. L_v is V_I with its own weights frozen; V_I is
trained on the μ and σ that led to the returns. No network depends on the number of agents, so a
trained team runs with any other N.

With ``turn_order: sequential``, V and V_I have one value per agent and turn. The value of agent i
sees the observations and latents of the agents up to i only, as later agents read what i wrote; the
advantage over it applies to i's tokens. Each joint action has its own state; L_v is the mean over
the agents.

Departures from the paper: the generated layer is a low-rank residual before the language-model
head, zero at the start, instead of the actor's middle layer; observations are pooled hidden states
of the prompts; the min-max extremes of L_d are constants of the gradient; advantages are
standardized over the step's joint actions (``normalize_advantages``); ``kl_coef`` weighs a k3 KL
to the initial policy (the base; with ``init_from`` its adapter and layer) on the same latents. In a
batch of one sample of two agents, L_d is 0 and has no gradient. If ``entropy_coef`` is 0, the
logged entropy is the sample estimate −log π.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from comlrl.config.algorithms import SHPPOConfig
from comlrl.credit.decisions import Decisions
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Part, Player
from comlrl.loop.steps import Rolled
from comlrl.models.agent import Agent
from comlrl.models.critics import TeamCritic
from comlrl.models.latent_networks import (
    HeterogeneousLayer,
    HeterogeneousPolicy,
    InferenceNet,
    frozen,
)
from comlrl.models.logprobs import ActionLogprobs, action_logprobs
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.processes.statistics import Sums, extremes, moments, standardized
from comlrl.run_files import HETEROGENEOUS
from comlrl.types import Row, Sampling, TokenBatch
from comlrl.update.losses import (
    clipped_policy,
    latent_distances,
    latent_diversity,
    latent_entropy,
    latent_logprob,
    latent_loss,
)
from comlrl.update.minibatches import Pass, minibatches, passes
from comlrl.update.optimizer import optimizer_of
from comlrl.update.per_token import PerToken
from comlrl.update.policy_update import PolicyUpdate, run_epochs
from comlrl.update.values import PooledReader, StepValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A step's states and latents, and the values, advantages and returns of its joint actions."""

    decisions: Decisions
    parent_S: Sequence[int]  # the state one turn before, or −1
    observation_SND: torch.Tensor
    epsilon_SNK: torch.Tensor
    latent_SNK: torch.Tensor
    mu_SNK: torch.Tensor  # the encoder's output during the rollout, like sigma_SNK
    sigma_SNK: torch.Tensor
    state_C: torch.Tensor
    # V: the stages of a turn, one if all agents act simultaneously, else one per agent
    values: StepValues
    advantage_CV: torch.Tensor
    return_CV: torch.Tensor


class SHPPOTrainer:
    """Trainer of SHPPO's policy, critic, encoder and inference net on chains of turns."""

    def __init__(
        self,
        section: SHPPOConfig,
        team: Team,
        policy: HeterogeneousPolicy,
        rollout: Player,
        loop: Loop,
        sampling: Sampling,
    ) -> None:
        """Set up the trainer. ``policy``: the layer and the encoder that ``rollout``'s sampler
        uses."""
        self.section, self.team, self.policy = section, team, policy
        self.rollout, self.loop, self.sampling = rollout, loop, sampling
        self.agent, self.num_agents = team.agents[0], section.num_agents
        self.stages = section.shape.stages
        # The KL's reference. B is 0, so the layer has no effect, unless ``init_from`` trained it.
        self.start_layer = copy.deepcopy(policy.layer).requires_grad_(False)
        sizes = self.policy.sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rollout.seed + 1)
            self.critic = TeamCritic(sizes["width"]).to(self.agent.device)
            self.inference = InferenceNet(sizes["width"], sizes["hidden"], sizes["latent_dim"])
        self.inference.to(self.agent.device)
        actor = [*self.agent.parameters(), *self.policy.layer.parameters()]
        encoder, inference = policy.encoder.parameters(), self.inference.parameters()
        critic = self.critic.parameters()
        optimizer = partial(optimizer_of, section, agent=0)
        self.optimizers = {
            "actor": optimizer(actor, section.learning_rate),
            "critic": optimizer(critic, section.value_learning_rate),
            "encoder": optimizer(encoder, section.latent_learning_rate),
            "inference": optimizer(inference, section.inference_learning_rate),
        }

    def train(self) -> None:
        self.loop.train(self)

    def parts(self) -> Mapping[str, Part]:
        parts: dict[str, Part] = {
            **self.team.parts(),
            HETEROGENEOUS: self.policy,
            "reference_layer": self.start_layer,
            "critic": self.critic,
            "inference": self.inference,
        }
        return parts | {f"{name}_optimizer": o for name, o in self.optimizers.items()}

    @torch.no_grad()
    def credit(self, rolled: Rolled) -> Samples:
        """Return the rollout's states and latents with their values, advantages and returns."""
        decisions, agents = rolled.decisions, self.num_agents
        sizes, device = self.policy.sizes, self.agent.device
        first_S = decisions.prompts[::agents]  # the first agent's decision in each state
        kept_SN = [[decisions[d + i].completion.latent for i in range(agents)] for d in first_S]

        def stack(name: str, width: int) -> torch.Tensor:
            parts = [torch.stack([getattr(latent, name) for latent in row]) for row in kept_SN]
            stacked = torch.stack(parts) if parts else torch.zeros(0, agents, width)
            return stacked.to(device)

        observation_SND = stack("observation_D", sizes["width"])
        before_S = [decisions[d].before for d in first_S]
        parent_S = [decisions[d].state if d >= 0 else -1 for d in before_S]
        mu_SNK, sigma_SNK = self.policy.encoder.along_chains(observation_SND, parent_S)
        # V of each joint action at each stage, given the observations up to it. All agents of a
        # stage have the same value, so it is computed for the first one only. MAPPO uses the same
        # PooledReader on every completion of the stage and averages over completions; here that
        # would round the sums differently.
        acting = [stage.start for stage in self.stages]
        views_S = decisions.views(acting, centralized=True)
        self.critic.observe(observation_SND.flatten(0, 1))
        reader = PooledReader(self.critic, decisions, observation_SND.flatten(0, 1), views_S)
        values = StepValues(self.section, reader)
        chains = decisions.chains(acting)
        advantage = values.credit(chains, decisions.reward, None)
        advantage_CV, return_CV = (
            part.flat().to(device).view(-1, len(self.stages))
            for part in (advantage, values.returns)
        )
        states = [decision.state for decision in decisions.numbered[::agents]]
        state_C = torch.tensor(states, dtype=torch.long, device=device)
        epsilon, latent = (stack(n, sizes["latent_dim"]) for n in ("epsilon_K", "value_K"))
        return Samples(
            decisions=decisions,
            parent_S=parent_S,
            observation_SND=observation_SND,
            epsilon_SNK=epsilon,
            latent_SNK=latent,
            mu_SNK=mu_SNK,
            sigma_SNK=sigma_SNK,
            state_C=state_C,
            values=values,
            advantage_CV=advantage_CV,
            return_CV=return_CV,
        )

    def _inferred(
        self, samples: Samples, mu_SNK: torch.Tensor, sigma_SNK: torch.Tensor
    ) -> torch.Tensor:
        """Compute V_I of each stage, (S, V), differentiable in the latents of the stage's agents
        only."""

        def up_to(stage: range, latent_SNK: torch.Tensor) -> torch.Tensor:
            before = latent_SNK[:, : stage.start].detach()
            return torch.cat([before, latent_SNK[:, stage.start : stage.stop]], 1)

        return torch.stack(
            [
                self.inference(
                    samples.observation_SND[:, : stage.stop],
                    up_to(stage, mu_SNK),
                    up_to(stage, sigma_SNK),
                )
                for stage in self.stages
            ],
            1,
        )

    def learn(self, rolled: Rolled, samples: Samples) -> dict[str, float]:
        """Run the epochs of updates and return the metrics."""
        section, key = self.section, (self.rollout.seed, "minibatches", rolled.index)
        rows_SN = samples.decisions.rows(range(self.num_agents), section.weight_T)
        states, size = samples.decisions.states_B, section.train_batch_size

        def rows(chosen: Sequence[int]) -> list[Row]:
            return [row for s in chosen for row in rows_SN[s]]

        policy = PolicyUpdate(
            section,
            self.team,
            self.agent,
            lambda batch: self._logprobs(self.agent, self.policy.layer, samples, batch),
            lambda start, batch: self._logprobs(start, self.start_layer, samples, batch),
            kl_in_loss=section.kl_coef,
        )
        first = minibatches(states, size, (*key, 0), rolled.deal)
        policy.measure([rows(chosen) for chosen in first[1:]])
        metrics = self._metrics_before(samples)
        if section.normalize_advantages:
            advantage_X = standardized(samples.advantage_CV.flatten())
            samples = replace(samples, advantage_CV=advantage_X.view_as(samples.advantage_CV))
        policy.credit(self._advantages(samples), rows(range(len(rows_SN))))
        losses = []

        def update(chosen: list[int], sums: Sums, progress: float) -> float:
            actor = [self.optimizers["actor"]]
            norm = policy.update(rows(chosen), actor, sums, progress)
            loss, count = samples.values.descend(self.optimizers["critic"], chosen, progress)
            losses.append(loss / count)
            return norm

        def after(epoch: Pass) -> dict[str, float]:
            if section.latents != "learned":
                return {}
            encoder_metrics = self.update_encoder(samples, epoch.progress)
            if section.latent_gradient == "policy":
                return encoder_metrics
            return encoder_metrics | {
                "inference_loss": self.update_inference(samples, epoch.progress)
            }

        epochs = passes(states, size, section.ppo_epochs, key, rolled.span, rolled.deal)
        metrics |= run_epochs(epochs, section.target_kl, update, after)
        self.critic.returns.add(samples.values.returns.flat()[:, None])
        metrics |= policy.before()
        return metrics | {
            "value_loss": sum(losses) / len(losses),
            "learning_rate": self.optimizers["actor"].learning_rate,
        }

    def _advantages(self, samples: Samples) -> PerToken:
        """Return for each completion the advantage of its joint action, at the stage in which
        its agent acts."""
        advantage = PerToken()
        for stage, advantage_C in zip(self.stages, samples.advantage_CV.T, strict=True):
            for action, action_advantage in enumerate(advantage_C.split(1)):
                numbers = (action * self.num_agents + agent for agent in stage)
                advantage.of_completion.update(dict.fromkeys(numbers, action_advantage))
        return advantage

    def _logprobs(
        self, agent: Agent, layer: HeterogeneousLayer, samples: Samples, batch: TokenBatch
    ) -> ActionLogprobs:
        """Compute log π with each token's stored latent in the layer before the head."""
        number_A = batch.completion_RL[batch.action_mask_RL].to(samples.state_C.device)
        action_A, agent_A = number_A // self.num_agents, number_A % self.num_agents
        return action_logprobs(
            agent,
            batch,
            self.sampling.for_agent(0).temperature,  # the same for all agents
            entropy=self.section.entropy_coef > 0,
            head=layer,
            head_input_A=samples.latent_SNK[samples.state_C[action_A], agent_A],
        )

    def _metrics_before(self, samples: Samples) -> dict[str, float]:
        """Return the step's metrics from before the update."""
        _, mean, deviation = moments(samples.advantage_CV.flatten())
        metrics = {
            "advantage_mean": mean,
            "advantage_std": deviation,
            "explained_variance": samples.values.explained_variance(),
        }
        if self.num_agents > 1 and self.section.latents == "learned":
            distances = latent_distances(samples.latent_SNK).flatten()
            metrics["latent/cosine_distance"] = moments(distances)[1]
        return metrics

    def update_encoder(self, samples: Samples, progress: float) -> dict[str, float]:
        """Take one optimizer step of the encoder on L_latent, through μ and σ."""
        section = self.section
        mu_SNK, sigma_SNK = self.policy.encoder.along_chains(
            samples.observation_SND, samples.parent_S
        )
        distance_SP = latent_distances(mu_SNK + sigma_SNK * samples.epsilon_SNK)
        entropy_S = latent_entropy(sigma_SNK)
        diversity_S = latent_diversity(distance_SP, *extremes(distance_SP))
        parts = {"entropy": entropy_S, "distance": diversity_S}
        weighed = (entropy_S, diversity_S, section.lambda_e, section.lambda_d)
        if section.latent_gradient == "policy":
            policy_C = self._latent_policy(samples, mu_SNK, sigma_SNK)
            losses = [policy_C, latent_loss(0.0, *weighed)]
        else:
            with frozen(self.inference):
                value_S = self._inferred(samples, mu_SNK, sigma_SNK).mean(1)
            parts, losses = parts | {"value": value_S}, [latent_loss(value_S, *weighed)]
        metrics = {f"latent/{name}": moments(part.detach())[1] for name, part in parts.items()}
        return metrics | {"latent/loss": self._descend("encoder", progress, *losses)}

    def _latent_policy(
        self, samples: Samples, mu_SNK: torch.Tensor, sigma_SNK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the clipped surrogate of the sampled latents for each joint action, (C,)."""
        own_SN = latent_logprob(samples.latent_SNK, mu_SNK, sigma_SNK)
        old_SN = latent_logprob(samples.latent_SNK, samples.mu_SNK, samples.sigma_SNK)
        loss_CN = clipped_policy(
            own_SN[samples.state_C],
            old_SN[samples.state_C],
            samples.advantage_CV,
            self.section.clip_range,
        )
        return loss_CN.mean(1)

    def update_inference(self, samples: Samples, progress: float) -> float:
        """Take one optimizer step of V_I on the rollout's μ, σ and returns; return the mean
        loss."""
        value_SV = self._inferred(samples, samples.mu_SNK, samples.sigma_SNK)
        loss_CV = (value_SV[samples.state_C] - samples.return_CV) ** 2
        return self._descend("inference", progress, loss_CV.flatten())

    def _descend(self, name: str, progress: float, *losses_X: torch.Tensor) -> float:
        """Take one optimizer step on the sum of the losses, each averaged over all processes;
        return that sum."""
        counts = [max(1, distributed.total(len(loss_X))) for loss_X in losses_X]
        parts = [loss_X.sum() / n for loss_X, n in zip(losses_X, counts, strict=True)]
        loss = torch.stack(parts).sum()
        optimizer = self.optimizers[name]
        optimizer.zero()
        loss.backward()
        optimizer.step(progress)
        return distributed.total(float(loss.detach()))
