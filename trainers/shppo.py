"""SHPPO: scalable heterogeneous PPO (arXiv 2404.03869), carried over to language agents.

All agents share one policy (base and one LoRA adapter). Agent i's latent l_i = μ_i + σ_i ε_i comes
from what it reads and has read, and generates its layer before the language-model head
(``comlrl/heterogeneous.py``). With the team's V(s_t) on pooled observations and GAE over turns, in
each epoch, in this order:

    actor {LoRA, A, B, decoder}:  −mean_a w_t min(ρ_a Â_t, clip(ρ_a, 1 ± ε) Â_t) − c_H · mean_a H_a
    critic {V}:                   ½ max((V − R)², (clip(V, V_old ± ε_v) − R)²)
    encoder {projection, GRU, LatentNet}:  L_latent = −L_v + λ_e L_e − λ_d L_d
    inference {V_I}:              (V_I(s, {μ_i, σ_i}) − R)²

A turn's Â goes to every token that every agent wrote in it; the ratio is per token. o_i, ε_i and
l_i are kept from the rollout: all ratios use the stored l_i, so that only the policy moves them,
and L_latent alone recomputes μ and σ, with the stored ε. L_v is V_I with its own weights frozen;
V_I learns on the μ and σ that earned the returns. Nothing depends on the number of agents, so a
trained team runs with any other N.

Departures from the paper: the generated layer is a low-rank residual before the language-model
head, zero at the start, instead of the actor's middle layer; observations are pooled hidden states
of the prompts; the min-max extremes of L_d are constants of the gradient; advantages are
standardized over the step's joint actions (``normalize_advantages``); ``kl_coef`` weighs a k3 KL
to what the run started from (the base; with ``init_from`` its adapter and layer) on the same
latents. Within one sample of two agents L_d is 0 and has no gradient: it needs a batch. Where
``entropy_coef`` is 0 the logged entropy is the estimate −log π.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comlrl import distributed
from comlrl.actor_critic import (
    Chains,
    PerToken,
    Stats,
    chains_of,
    explained_variance,
    extremes,
    minibatches,
    moments,
    passes,
    standardized,
    surrogate,
    turn_advantages,
)
from comlrl.batching import Row
from comlrl.critic import TeamCritic
from comlrl.heterogeneous import HeterogeneousLayer, InferenceNet, LatentSampler, frozen
from comlrl.latent_log import LatentLog
from comlrl.loop import Loop, Step
from comlrl.losses import (
    clipped_value,
    k3_kl,
    latent_distances,
    latent_diversity,
    latent_entropy,
    latent_loss,
)
from comlrl.policy import ActionLogprobs, action_logprobs
from comlrl.rollout import Rollout, Shape
from comlrl.team import Agent, Team
from comlrl.types import NonFiniteError, Sampling, Span, TokenBatch, Tree
from comlrl.update import accumulate, explained, measure_all, optimizer_of
from trainers.configs import SHPPOConfig

__all__ = ["SHPPOConfig", "SHPPOTrainer"]


@dataclass(slots=True)
class Samples:
    """A step's states, their latents, and what the update needs of the joint actions."""

    chains: Chains
    observation_SND: torch.Tensor
    epsilon_SNK: torch.Tensor
    latent_SNK: torch.Tensor
    mu_SNK: torch.Tensor  # the encoder's of the rollout
    sigma_SNK: torch.Tensor
    state_C: torch.Tensor
    value_S: torch.Tensor  # the critic's before the update
    advantage_C: torch.Tensor
    return_C: torch.Tensor
    logprob: PerToken  # under the policy that sampled; completions are numbered c · N + agent
    reference: PerToken


class SHPPOTrainer:
    """Grow chains, credit their turns, improve policy, critic, encoder and inference net."""

    def __init__(
        self,
        section: SHPPOConfig,
        team: Team,
        sampler: LatentSampler,
        rollout: Rollout,
        loop: Loop,
        sampling: Sampling,
        tree_metrics: Callable[[Sequence[Tree]], dict[str, float]],
    ) -> None:
        self.section, self.team, self.sampler = section, team, sampler
        self.rollout, self.loop, self.sampling = rollout, loop, sampling
        self.tree_metrics = tree_metrics
        self.policy, self.agent = sampler.policy, team.agents[0]
        self.latent_log = LatentLog(loop.run_dir)
        self.shape = Shape(
            section.num_agents,
            section.num_turns,
            section.num_generations,
            early_termination_threshold=section.early_termination_threshold,
            later_generations=1,
        )
        # What the run started from: B = 0, which changes nothing, unless it was trained before.
        self.start_layer = copy.deepcopy(self.policy.layer).requires_grad_(False)
        self.weight_T = section.turn_gradient_weights or [1.0] * section.num_turns
        sizes = self.policy.sizes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rollout.seed + 1)
            self.critic = TeamCritic(sizes["width"]).to(self.agent.device)
            self.inference = InferenceNet(sizes["width"], sizes["hidden"], sizes["latent_dim"])
        self.inference.to(self.agent.device)
        actor = [*self.agent.parameters(), *self.policy.layer.parameters()]
        encoder, inference = self.policy.encoder.parameters(), self.inference.parameters()
        self.optimizers = {
            "actor": optimizer_of(section, actor, section.learning_rate),
            "critic": optimizer_of(section, self.critic.parameters(), section.value_learning_rate),
            "encoder": optimizer_of(section, encoder, section.latent_learning_rate),
            "inference": optimizer_of(section, inference, section.inference_learning_rate),
        }

    def train(self) -> None:
        if self.loop.counters.steps == 0:
            self.latent_log.start()
        for step in self.loop.steps(self):
            self._step(step)

    def _step(self, step: Step) -> None:
        trees = self.rollout.grow(
            distributed.share(step.tasks), self.shape, self.sampling, ("train", step.index)
        )
        step.clock.lap("rollout")
        samples = self._credited(chains_of(trees), step.index)
        scored = int(distributed.total(len(samples.state_C)))
        try:
            metrics = self._improve(samples, step.index, self.loop.span(scored))
        except NonFiniteError as error:
            raise explained(error, 0, step.index, self.loop.run_dir) from error
        step.clock.lap("update")
        everyone = distributed.gather(trees)
        self.loop.record(
            step,
            env_steps=scored,
            updates=int(metrics.pop("updates")),
            scored=scored,
            tokens=int(distributed.total(samples.chains.tokens)),
            metrics=self.tree_metrics(everyone)
            | metrics
            | {"learning_rate": self.optimizers["actor"].learning_rate},
            trees=everyone,
        )
        if step.index % self.section.logging_steps == 0:
            env_steps = self.loop.counters.env_steps
            self.latent_log.write(env_steps, samples.chains.nodes_S, samples.mu_SNK)

    @torch.no_grad()
    def _credited(self, chains: Chains, step: int) -> Samples:
        """The rollout's latents beside its states; values, advantages and returns."""
        key = (self.rollout.seed, "train", step)
        taken_SN = [
            [self.sampler.taken[(*key, task.task_id, path, i)] for i in range(self._agents)]
            for task, path in zip(chains.tasks_S, chains.paths_S, strict=True)
        ]
        sizes, device = self.policy.sizes, self.agent.device

        def stack(name: str, width: int) -> torch.Tensor:
            parts = [torch.stack([getattr(one, name) for one in row]) for row in taken_SN]
            empty = torch.zeros(0, self._agents, width, device=device)
            return torch.stack(parts) if parts else empty

        observation_SND = stack("observation_D", sizes["width"])
        mu_SNK, sigma_SNK = self.policy.encoder.along_chains(observation_SND, chains.parent_S)
        value_S = self.critic(observation_SND)
        advantage_C, return_C = turn_advantages(
            chains, value_S, self.section.discount, self.section.gae_lambda
        )
        state_C = torch.tensor(chains.state_C, dtype=torch.long, device=device)
        epsilon, latent = (stack(n, sizes["latent_dim"]) for n in ("epsilon_K", "latent_K"))
        return Samples(
            chains, observation_SND, epsilon, latent, mu_SNK, sigma_SNK, state_C,
            value_S, advantage_C, return_C, PerToken(), PerToken(),
        )  # fmt: skip

    @property
    def _agents(self) -> int:
        return self.section.num_agents

    def _improve(self, samples: Samples, step: int, span: Span) -> dict[str, float]:
        """The epochs; what the log wants."""
        section, key = self.section, (self.rollout.seed, "minibatches", step)
        rows_SN = self._rows(samples.chains)
        states, size = samples.chains.states_B, section.train_batch_size
        first = minibatches(states, size, (*key, 0))
        self._measure(samples, [[row for s in chosen for row in rows_SN[s]] for chosen in first])
        metrics = self._said_before(samples)
        if section.normalize_advantages:
            samples.advantage_C = standardized(samples.advantage_C)
        stats, norms, losses = Stats(), [], []
        for one_pass in passes(states, size, section.ppo_epochs, key, span):
            of_epoch = Stats()
            for chosen, progress in one_pass.minibatches:
                rows = [row for s in chosen for row in rows_SN[s]]
                norms.append(self._update_actor(samples, rows, of_epoch, progress))
                losses.append(self._update_critic(samples, chosen, progress))
            metrics |= self._update_encoder(samples, one_pass.progress)
            metrics["inference_loss"] = self._update_inference(samples, one_pass.progress)
            stats.absorb(of_epoch)
            metrics["approx_kl"] = of_epoch.means()["approx_kl"]
            if section.target_kl is not None and metrics["approx_kl"] > section.target_kl:
                break
        return (
            stats.means()
            | metrics
            | {
                "value_loss": sum(losses) / len(losses),
                "ppo_epochs": float(one_pass.number),
                "updates": float(len(norms)),
                "gradient_norm": max(norms),
            }
        )

    def _rows(self, chains: Chains) -> list[list[Row]]:
        """The rows of all agents, state by state; completions are numbered c · N + agent."""
        of_agents = []
        for i in range(self._agents):
            numbers = range(i, len(chains.reward_C) * self._agents, self._agents)
            of_agents.append(chains.rows(i, self.weight_T, numbers))
        return [list(rows) for rows in zip(*of_agents, strict=True)]

    def _logprobs(
        self, agent: Agent, layer: HeterogeneousLayer, samples: Samples, batch: TokenBatch
    ) -> ActionLogprobs:
        """log π with each token's own stored latent in the layer before the head."""
        number_A = batch.completion_RL[batch.action_mask_RL].to(samples.state_C.device)
        state_A, agent_A = samples.state_C[number_A // self._agents], number_A % self._agents
        return action_logprobs(
            agent,
            batch,
            self.sampling.temperature,
            entropy=self.section.entropy_coef > 0,
            head=layer,
            head_input_A=samples.latent_SNK[state_A, agent_A],
        )

    def _measure(self, samples: Samples, minibatches: Sequence[Sequence[Row]]) -> None:
        """Old log-probabilities, and the reference's, on the first epoch's own tensors."""

        def measure(batch: TokenBatch) -> None:
            said = self._logprobs(self.agent, self.policy.layer, samples, batch)
            samples.logprob.put(batch, said.logprob_A)
            if self.section.kl_coef > 0:
                with self.team.reference(0) as start:
                    said = self._logprobs(start, self.start_layer, samples, batch)
                samples.reference.put(batch, said.logprob_A)

        for rows in minibatches:
            measure_all(self.agent, rows, measure, self.team.side_by_side)

    def _said_before(self, samples: Samples) -> dict[str, float]:
        """What the log wants of the step before its update."""
        old = samples.logprob.flat()
        _, mean, deviation = moments(samples.advantage_C)
        metrics = {} if self.section.entropy_coef > 0 else {"entropy": -moments(old)[1]}
        metrics |= {
            "advantage_mean": mean,
            "advantage_std": deviation,
            "explained_variance": explained_variance(
                samples.value_S[samples.state_C], samples.return_C
            ),
            "latent/cosine_distance": moments(latent_distances(samples.latent_SNK).flatten())[1],
        }
        if self.section.kl_coef > 0:
            metrics["kl"] = moments(old - samples.reference.flat())[1]
        if self._agents == 1:
            del metrics["latent/cosine_distance"]
        return metrics

    def _update_actor(
        self, samples: Samples, rows: Sequence[Row], stats: Stats, progress: float
    ) -> float:
        """One optimizer step of LoRA, A, B and decoder; the gradient's norm before clipping."""
        tokens = int(distributed.total(sum(len(ids) for row in rows for ids in row.completions)))
        optimizer = self.optimizers["actor"]
        optimizer.zero()
        told = accumulate(
            self.agent,
            rows,
            lambda batch: self._actor_loss(samples, batch, tokens),
            parameters=optimizer.parameters,
            concurrent=self.team.side_by_side,
        )
        for of_batch in told:
            stats.absorb(of_batch)
        return optimizer.step(progress)

    def _actor_loss(
        self, samples: Samples, batch: TokenBatch, tokens: int
    ) -> tuple[torch.Tensor, Stats]:
        """Σ over a micro-batch's tokens, over ``tokens``; sums for the log."""
        section, stats = self.section, Stats()
        said = self._logprobs(self.agent, self.policy.layer, samples, batch)
        number_A = batch.completion_RL[batch.action_mask_RL].to(samples.state_C.device)
        loss_A = surrogate(
            said.logprob_A,
            samples.logprob.get(batch),
            samples.advantage_C[number_A // self._agents],
            section.clip_range,
            stats,
        )
        loss_A = loss_A * batch.weight_RL[batch.action_mask_RL].to(loss_A)
        if section.entropy_coef > 0:
            assert said.entropy_A is not None
            loss_A = loss_A - section.entropy_coef * said.entropy_A
            stats.add(entropy=said.entropy_A)
        if section.kl_coef > 0:
            loss_A = loss_A + section.kl_coef * k3_kl(said.logprob_A, samples.reference.get(batch))
        stats.add(loss=loss_A)
        return loss_A.sum() / tokens, stats

    def _update_critic(self, samples: Samples, chosen: Sequence[int], progress: float) -> float:
        """One step of V on these states' joint actions; the mean loss."""
        number_C = [c for s in chosen for c in samples.chains.actions_S[s]]
        index_C = torch.tensor(number_C, dtype=torch.long, device=samples.state_C.device)
        state_C = samples.state_C[index_C]
        loss_C = clipped_value(
            self.critic(samples.observation_SND[state_C]),
            samples.value_S[state_C],
            samples.return_C[index_C],
            self.section.value_clip_range,
        )
        return self._descend("critic", loss_C, progress)

    def _update_encoder(self, samples: Samples, progress: float) -> dict[str, float]:
        """One step of L_latent, through μ and σ, into the encoder alone."""
        section = self.section
        mu_SNK, sigma_SNK = self.policy.encoder.along_chains(
            samples.observation_SND, samples.chains.parent_S
        )
        with frozen(self.inference):
            value_S = self.inference(samples.observation_SND, mu_SNK, sigma_SNK)
        distance_SP = latent_distances(mu_SNK + sigma_SNK * samples.epsilon_SNK)
        entropy_S = latent_entropy(sigma_SNK)
        diversity_S = latent_diversity(distance_SP, *extremes(distance_SP))
        loss_S = latent_loss(value_S, entropy_S, diversity_S, section.lambda_e, section.lambda_d)
        parts = {"value": value_S, "entropy": entropy_S, "distance": diversity_S}
        said = {f"latent/{name}": moments(part.detach())[1] for name, part in parts.items()}
        return said | {"latent/loss": self._descend("encoder", loss_S, progress)}

    def _update_inference(self, samples: Samples, progress: float) -> float:
        """One step of V_I on the returns that the rollout's μ and σ earned; the mean loss."""
        value_S = self.inference(samples.observation_SND, samples.mu_SNK, samples.sigma_SNK)
        loss_C = (value_S[samples.state_C] - samples.return_C) ** 2
        return self._descend("inference", loss_C, progress)

    def _descend(self, name: str, loss_X: torch.Tensor, progress: float) -> float:
        """One optimizer step on the mean over all processes; that mean."""
        sums = distributed.totals({"count": len(loss_X), "loss": float(loss_X.detach().sum())})
        count = max(1.0, sums["count"])
        optimizer = self.optimizers[name]
        optimizer.zero()
        (loss_X.sum() / count).backward()
        optimizer.step(progress)
        return sums["loss"] / count

    def state(self) -> dict[str, Any]:
        return {}

    def state_tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        tensors: dict[str, Mapping[str, torch.Tensor]] = dict(self.team.state_tensors())
        tensors |= {
            "heterogeneous": self.policy.state_dict(),
            "reference_layer": self.start_layer.state_dict(),
            "critic": self.critic.state_dict(),
            "inference": self.inference.state_dict(),
        }
        return tensors | {
            f"{name}_optimizer": optimizer.state_tensors()
            for name, optimizer in self.optimizers.items()
        }

    def load(
        self, state: Mapping[str, Any], tensors: Mapping[str, dict[str, torch.Tensor]]
    ) -> None:
        self.team.load_tensors(tensors)
        self.policy.load_state_dict(tensors["heterogeneous"])
        self.start_layer.load_state_dict(tensors["reference_layer"])
        self.critic.load_state_dict(tensors["critic"])
        self.inference.load_state_dict(tensors["inference"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_tensors(tensors[f"{name}_optimizer"])
        self.latent_log.keep_until(self.loop.counters.env_steps)
