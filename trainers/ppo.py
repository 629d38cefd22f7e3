"""PPO for language agents (arXiv 1707.06347); with num_agents > 1 independent PPO or MAPPO.

Objective of agent i over the tokens a of a minibatch, ρ_a = π_i(a) / π_i,old(a):

    L_i = −mean_a w_t min(ρ_a Â_a, clip(ρ_a, 1 ± ε) Â_a) − c_H · mean_a H_a
    V's: mean_a ½ max((V_a − R_a)², (clip(V_a, V_old,a ± ε_v) − R_a)²)

``critic: independent``: V_i is a value head on agent i's last hidden state. A turn's reward comes
with its last token, every token pays kl_coef · (log π_old − log π_ref), and Â is GAE over all the
tokens of a chain: γ is gamma_token within a turn and discount, once, between turns; a chain ends
with its task. R = Â + V_old.

``critic: centralized`` (MAPPO, arXiv 2103.01955): one V(s_t) for each turn on all agents' prompts;
GAE over turns, and a turn's Â goes to all tokens that all agents wrote in it. There the KL to the
reference is a k3 term in the loss, as one reward of the team cannot tell whose tokens strayed.

Old log-probabilities and values come from one pass over the first epoch's own minibatches, so
that the first minibatch's ratios are exactly 1. Rollouts are chains: G samples at turn 1, one at
each turn after it.

Departures: the value head does not train the policy (its input's gradient is stopped), so that
it has its own optimizer and no coefficient; advantages are standardized over the step's tokens of
an agent (``normalize_advantages``). Where ``entropy_coef`` is 0 the entropy that is logged is the
estimate −log π of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from comlrl.credit.chains import Chains, chains_of
from comlrl.loop.loop import Beside, Loop
from comlrl.loop.steps import Step
from comlrl.models.agent import Agent
from comlrl.models.critics import TeamCritic, TokenCritic, hidden_width, observations
from comlrl.models.logprobs import ActionLogprobs, action_logprobs
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.processes.statistics import (
    Sums,
    agent_means,
    explained_variance,
    moments,
    standardized,
)
from comlrl.rollout.grow import Rollout
from comlrl.types import Part, Sampling, Span, TokenBatch
from comlrl.update.clipped import ClippedPolicy, run_epochs
from comlrl.update.losses import clipped_value
from comlrl.update.minibatches import minibatches, passes
from comlrl.update.optimizer import optimizer_of
from comlrl.update.per_token import PerToken, token_advantages, turn_advantages
from trainers.configs import PPOConfig


class KLCoefficient:
    """The weight of the KL to the reference: fixed, or led to ``kl_target`` (Ziegler 2019)."""

    def __init__(self, section: PPOConfig) -> None:
        self.section, self.value = section, section.kl_coef

    def adapt(self, kl: float, joint_actions: int) -> None:
        """kl_coef ← kl_coef · (1 + clip(KL / target − 1, ±0.2) · n / horizon)."""
        assert self.section.kl_target is not None
        error = max(-0.2, min(0.2, kl / self.section.kl_target - 1))
        self.value *= 1 + error * joint_actions / self.section.kl_horizon

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"value": torch.tensor(self.value, dtype=torch.float64)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.value = float(tensors["value"])


class OwnCritic:
    """One agent's value head in one training step: GAE over tokens, and its clipped loss."""

    def __init__(self, section: PPOConfig, critic: torch.nn.Module) -> None:
        self.section, self.critic = section, critic
        self.value, self.returns = PerToken(), PerToken()  # of before the update

    def see(self, batch: TokenBatch, said: ActionLogprobs) -> None:
        self.value.put(batch, self.critic(said.hidden_AD))

    def credit(self, policy: ClippedPolicy, chains: Chains, kl_coef: float) -> dict[str, float]:
        """Advantages into the policy; what the log wants."""
        section, penalty = self.section, None
        if section.kl_coef > 0:
            log_ratio = policy.logprob.flat() - policy.reference.flat()
            penalty = policy.logprob.like(kl_coef * log_ratio)
        policy.advantage, self.returns = token_advantages(
            chains,
            self.value,
            penalty,
            gamma_token=section.gamma_token,
            discount=section.discount,
            gae_lambda=section.gae_lambda,
        )
        return {"explained_variance": explained_variance(self.value.flat(), self.returns.flat())}

    def loss(self, batch: TokenBatch, said: ActionLogprobs, sums: Sums) -> torch.Tensor:
        """½ max((V − R)², (clip(V, V_old ± ε_v) − R)²) of each token."""
        loss_A = clipped_value(
            self.critic(said.hidden_AD),
            self.value.get(batch),
            self.returns.get(batch),
            self.section.value_clip_range,
        )
        sums.add(value_loss=loss_A)
        return loss_A


class PPOTrainer:
    """Grow chains, credit their tokens, improve each agent for some epochs."""

    def __init__(
        self,
        section: PPOConfig,
        team: Team,
        rollout: Rollout,
        loop: Loop,
        sampling: Sampling,
        beside: Beside | None = None,
    ) -> None:
        """``beside``: more metrics of each evaluation's trees."""
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling, self.beside, self.kl = sampling, beside, KLCoefficient(section)
        self.weight_T = section.turn_gradient_weights or [1.0] * section.num_turns
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rollout.seed)
            self.critics = self._critics()
        self.optimizers = [
            optimizer_of(section, agent.parameters(), section.learning_rate, agent.index)
            for agent in team.agents
        ]
        self.critic_optimizers = [
            optimizer_of(section, critic.parameters(), section.value_learning_rate, index)
            for index, critic in enumerate(self.critics)
        ]

    def _critics(self) -> list[torch.nn.Module]:
        """A value head for each agent, or one critic for the team."""
        made: list[torch.nn.Module] = []
        for agent in self.team.agents[: 1 if self._centralized else None]:
            kind = TeamCritic if self._centralized else TokenCritic
            made.append(kind(hidden_width(agent)).to(agent.device))
        return made

    @property
    def _centralized(self) -> bool:
        return self.section.critic == "centralized"

    def train(self) -> None:
        for step in self.loop.steps(self, self.beside):
            self._step(step)

    def parts(self) -> Mapping[str, Part]:
        parts: dict[str, Part] = {**self.team.parts(), "kl_coef": self.kl}
        parts |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        parts |= {f"critic_{i}": critic for i, critic in enumerate(self.critics)}
        return parts | {f"critic_optimizer_{i}": o for i, o in enumerate(self.critic_optimizers)}

    def _step(self, step: Step) -> None:
        tasks, key = distributed.share(step.tasks), ("train", step.index)
        trees = self.rollout.grow(tasks, self.section.shape, self.sampling, key)
        gathered = self.loop.gather(step, trees)
        metrics = self._improve(chains_of(trees), step.index, gathered.span)
        if self.section.kl_target is not None:
            self.kl.adapt(metrics["kl"], gathered.scored)
        metrics["learning_rate"] = self.optimizers[0].learning_rate
        self.loop.record(step, gathered, updates=int(metrics.pop("updates")), metrics=metrics)

    def _improve(self, chains: Chains, step: int, span: Span) -> dict[str, float]:
        """Update every agent, then the team's critic; metrics bare (means) and of each agent."""
        of_team: dict[str, float] = {}
        turn_advantage_C = None
        if self._centralized:
            state_SND = self._states(chains)
            with torch.no_grad():
                value_S = self.critics[0](state_SND)
            turn_advantage_C, return_C = turn_advantages(
                chains, value_S, self.section.discount, self.section.gae_lambda
            )
            of_team["explained_variance"] = explained_variance(
                value_S[torch.tensor(chains.state_C)], return_C
            )
        of_agents = []
        for index in range(len(self.team)):
            with self.team.acting(index) as agent:
                of_agents.append(self._improve_agent(agent, chains, step, turn_advantage_C, span))
        if self._centralized:
            of_team["value_loss"] = self._improve_critic(
                chains, state_SND, value_S, return_C, step, span
            )
        of_team["updates"] = max(one.pop("updates") for one in of_agents)
        return agent_means(of_agents) | of_team

    def _improve_agent(
        self,
        agent: Agent,
        chains: Chains,
        step: int,
        turn_advantage_C: torch.Tensor | None,
        span: Span,
    ) -> dict[str, float]:
        """Some epochs of clipped updates of one agent and, unless centralized, its critic."""
        section, states, size = self.section, chains.states_B, self.section.train_batch_size
        key, temperature = (self.rollout.seed, "minibatches", step), self.sampling.temperature
        rows_S = chains.rows(agent.index, self.weight_T)

        def said(batch: TokenBatch) -> ActionLogprobs:
            return action_logprobs(agent, batch, temperature, entropy=section.entropy_coef > 0)

        def said_at_start(start: Agent, batch: TokenBatch) -> ActionLogprobs:
            return action_logprobs(start, batch, temperature)

        kl_in_loss = self.kl.value if self._centralized and section.kl_coef > 0 else 0.0
        policy = ClippedPolicy(section, self.team, agent, said, said_at_start, kl_in_loss)
        own = None if self._centralized else OwnCritic(section, self.critics[agent.index])
        first = [[rows_S[s] for s in chosen] for chosen in minibatches(states, size, (*key, 0))]
        metrics = policy.measure(first, None if own is None else own.see)
        if section.kl_coef > 0:
            metrics["kl_coef"] = self.kl.value
        optimizers = [self.optimizers[agent.index]]
        if own is None:
            assert turn_advantage_C is not None
            policy.credit_turns(turn_advantage_C)
        else:
            metrics |= own.credit(policy, chains, self.kl.value)
            optimizers.append(self.critic_optimizers[agent.index])
        metrics |= self._standardize(policy)

        value_loss = None if own is None else own.loss

        def update(chosen: list[int], sums: Sums, progress: float) -> float:
            rows = [rows_S[s] for s in chosen]
            return policy.update(rows, optimizers, sums, progress, value_loss)

        epochs = passes(states, size, section.ppo_epochs, key, span)
        return metrics | run_epochs(epochs, section.target_kl, update)

    def _standardize(self, policy: ClippedPolicy) -> dict[str, float]:
        """Advantages over the step's tokens as they are trained on; their first moments."""
        advantage = policy.advantage.flat()
        _, mean, deviation = moments(advantage)
        if self.section.normalize_advantages:
            policy.advantage = policy.advantage.like(standardized(advantage))
        return {"advantage_mean": mean, "advantage_std": deviation}

    @torch.no_grad()
    def _states(self, chains: Chains) -> torch.Tensor:
        """What each agent reads in each state, as its own policy pools it; (S, N, width)."""
        of_agents = []
        for index in range(len(self.team)):
            with self.team.acting(index) as agent:
                prompts = [node.agents_N[index].prompt_ids for node in chains.nodes_S]
                of_agents.append(observations(agent, prompts).to(self.team.agents[0].device))
        return torch.stack(of_agents, dim=1)

    def _improve_critic(
        self,
        chains: Chains,
        state_SND: torch.Tensor,
        old_S: torch.Tensor,
        return_C: torch.Tensor,
        step: int,
        span: Span,
    ) -> float:
        """The team's V on its own epochs of minibatches of states; the mean value loss."""
        critic, optimizer, section = self.critics[0], self.critic_optimizers[0], self.section
        key = (self.rollout.seed, "critic", step)
        total, count = 0.0, 0
        size, epochs = section.train_batch_size, section.ppo_epochs
        for one_pass in passes(chains.states_B, size, epochs, key, span):
            for chosen, progress in one_pass.minibatches:
                numbers = [c for s in chosen for c in chains.actions_S[s]]
                states = torch.tensor([chains.state_C[c] for c in numbers], dtype=torch.long)
                loss_C = clipped_value(
                    critic(state_SND[states]),
                    old_S[states],
                    return_C[torch.tensor(numbers, dtype=torch.long)],
                    section.value_clip_range,
                )
                everyone = max(1, int(distributed.total(len(numbers))))
                optimizer.zero()
                (loss_C.sum() / everyone).backward()
                optimizer.step(progress)
                total += distributed.total(float(loss_C.detach().sum()))
                count += everyone
        return total / count
