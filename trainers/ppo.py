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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from comlrl import distributed
from comlrl.actor_critic import (
    Chains,
    PerToken,
    Stats,
    chains_of,
    explained_variance,
    minibatches,
    moments,
    passes,
    standardized,
    surrogate,
    token_advantages,
    turn_advantages,
)
from comlrl.batching import Row
from comlrl.critic import TeamCritic, TokenCritic, hidden_width, observations
from comlrl.loop import Loop, Step, means
from comlrl.losses import clipped_value, k3_kl
from comlrl.policy import action_logprobs
from comlrl.rollout import Rollout, Shape
from comlrl.team import Agent, Team
from comlrl.types import NonFiniteError, Sampling, Span, TokenBatch, Tree
from comlrl.update import accumulate, explained, measure_all, optimizer_of
from trainers.configs import PPOConfig

__all__ = ["PPOConfig", "PPOTrainer"]


class Before:
    """What the policy said of the step's tokens before the update, and their credit."""

    def __init__(self) -> None:
        self.logprob, self.value, self.reference = PerToken(), PerToken(), PerToken()
        self.advantage, self.returns = PerToken(), PerToken()


class PPOTrainer:
    """Grow chains, credit their tokens, improve each agent for some epochs."""

    def __init__(
        self,
        section: PPOConfig,
        team: Team,
        rollout: Rollout,
        loop: Loop,
        sampling: Sampling,
        tree_metrics: Callable[[Sequence[Tree]], dict[str, float]],
    ) -> None:
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling, self.tree_metrics = sampling, tree_metrics
        self.shape = Shape(
            section.num_agents,
            section.num_turns,
            section.num_generations,
            early_termination_threshold=section.early_termination_threshold,
            later_generations=1,
        )
        self.weight_T = section.turn_gradient_weights or [1.0] * section.num_turns
        self.kl_coef = section.kl_coef
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rollout.seed)
            self.critics = self._critics()
        self.optimizers = [
            optimizer_of(section, agent.parameters(), section.learning_rate)
            for agent in team.agents
        ]
        self.critic_optimizers = [
            optimizer_of(section, critic.parameters(), section.value_learning_rate)
            for critic in self.critics
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
        for step in self.loop.steps(self):
            self._step(step)

    def _step(self, step: Step) -> None:
        trees = self.rollout.grow(
            distributed.share(step.tasks), self.shape, self.sampling, ("train", step.index)
        )
        step.clock.lap("rollout")
        chains = chains_of(trees)
        scored = int(distributed.total(len(chains.reward_C)))
        metrics = self._improve(chains, step.index, self.loop.span(scored))
        step.clock.lap("update")
        self._adapt_kl(metrics, scored)
        everyone = distributed.gather(trees)
        self.loop.record(
            step,
            env_steps=scored,
            updates=int(metrics.pop("updates")),
            scored=scored,
            tokens=int(distributed.total(chains.tokens)),
            metrics=self.tree_metrics(everyone)
            | metrics
            | {"learning_rate": self.optimizers[0].learning_rate},
            trees=everyone,
        )

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
                try:
                    of_agents.append(
                        self._improve_agent(agent, chains, step, turn_advantage_C, span)
                    )
                except NonFiniteError as error:
                    raise explained(error, index, step, self.loop.run_dir) from error
        if self._centralized:
            of_team["value_loss"] = self._improve_critic(
                chains, state_SND, value_S, return_C, step, span
            )
        of_team["updates"] = max(one.pop("updates") for one in of_agents)
        return means(of_agents) | of_team

    def _improve_agent(
        self,
        agent: Agent,
        chains: Chains,
        step: int,
        turn_advantage_C: torch.Tensor | None,
        span: Span,
    ) -> dict[str, float]:
        """Some epochs of clipped updates of one agent and, unless centralized, its critic."""
        section, states = self.section, chains.states_B
        key = (self.rollout.seed, "minibatches", step)
        size, epochs = section.train_batch_size, section.ppo_epochs
        rows = chains.rows(agent.index, self.weight_T)
        first = minibatches(states, size, (*key, 0))
        before = self._measure(agent, [[rows[s] for s in chosen] for chosen in first])
        metrics = self._credit(chains, before, turn_advantage_C)
        stats, norms = Stats(), []
        for one_pass in passes(states, size, epochs, key, span):
            of_epoch = Stats()
            for chosen, progress in one_pass.minibatches:
                own = [rows[s] for s in chosen]
                norms.append(self._update(agent, own, before, of_epoch, progress))
            stats.absorb(of_epoch)
            metrics["approx_kl"] = of_epoch.means()["approx_kl"]
            if section.target_kl is not None and metrics["approx_kl"] > section.target_kl:
                break
        return (
            stats.means()
            | metrics
            | {
                "ppo_epochs": float(one_pass.number),
                "updates": float(len(norms)),
                "gradient_norm": max(norms),
            }
        )

    def _measure(self, agent: Agent, minibatches: Sequence[Sequence[Row]]) -> Before:
        """Old log-probabilities, values and the reference's, on the first epoch's own tensors."""
        before, temperature = Before(), self.sampling.temperature

        def measure(batch: TokenBatch) -> None:
            said = action_logprobs(agent, batch, temperature, entropy=self.section.entropy_coef > 0)
            before.logprob.put(batch, said.logprob_A)
            if not self._centralized:
                before.value.put(batch, self.critics[agent.index](said.hidden_AD))
            if self.section.kl_coef > 0:
                with self.team.reference(agent.index) as reference:
                    ours = action_logprobs(reference, batch, temperature).logprob_A
                before.reference.put(batch, ours)

        for rows in minibatches:
            measure_all(agent, rows, measure, self.team.side_by_side)
        return before

    def _credit(
        self, chains: Chains, before: Before, turn_advantage_C: torch.Tensor | None
    ) -> dict[str, float]:
        """Advantages and returns of the agent's tokens into ``before``; what the log wants."""
        section, old = self.section, before.logprob.flat()
        metrics = {} if section.entropy_coef > 0 else {"entropy": -moments(old)[1]}
        if section.kl_coef > 0:
            log_ratio = old - before.reference.flat()
            metrics |= {"kl": moments(log_ratio)[1], "kl_coef": self.kl_coef}
        if turn_advantage_C is not None:
            for number, tokens in before.logprob.of_completion.items():
                spread = turn_advantage_C[number].to(tokens).expand(len(tokens))
                before.advantage.of_completion[number] = spread
        else:
            penalty = before.logprob.like(self.kl_coef * log_ratio) if section.kl_coef > 0 else None
            before.advantage, before.returns = token_advantages(
                chains,
                before.value,
                penalty,
                gamma_token=section.gamma_token,
                discount=section.discount,
                gae_lambda=section.gae_lambda,
            )
            metrics["explained_variance"] = explained_variance(
                before.value.flat(), before.returns.flat()
            )
        advantage = before.advantage.flat()
        _, metrics["advantage_mean"], metrics["advantage_std"] = moments(advantage)
        if section.normalize_advantages:
            before.advantage = before.advantage.like(standardized(advantage))
        return metrics

    def _update(
        self, agent: Agent, rows: Sequence[Row], before: Before, stats: Stats, progress: float
    ) -> float:
        """One optimizer step of the agent and its critic; the gradient's norm before clipping."""
        tokens = int(distributed.total(sum(len(ids) for row in rows for ids in row.completions)))
        optimizers = [self.optimizers[agent.index]]
        if not self._centralized:
            optimizers.append(self.critic_optimizers[agent.index])
        for optimizer in optimizers:
            optimizer.zero()
        told = accumulate(
            agent,
            rows,
            lambda batch: self._loss(agent, batch, before, tokens),
            parameters=[p for optimizer in optimizers for p in optimizer.parameters],
            concurrent=self.team.side_by_side,
        )
        for of_batch in told:
            stats.absorb(of_batch)
        norm, *_ = [optimizer.step(progress) for optimizer in optimizers]
        return norm

    def _loss(
        self, agent: Agent, batch: TokenBatch, before: Before, tokens: int
    ) -> tuple[torch.Tensor, Stats]:
        """Σ over a micro-batch's tokens of the policy's and the value head's losses, over
        ``tokens``; sums for the log."""
        section, stats = self.section, Stats()
        said = action_logprobs(
            agent, batch, self.sampling.temperature, entropy=section.entropy_coef > 0
        )
        loss_A = surrogate(
            said.logprob_A,
            before.logprob.get(batch),
            before.advantage.get(batch),
            section.clip_range,
            stats,
        )
        loss_A = loss_A * batch.weight_RL[batch.action_mask_RL].to(loss_A)
        if section.entropy_coef > 0:
            assert said.entropy_A is not None
            loss_A = loss_A - section.entropy_coef * said.entropy_A
            stats.add(entropy=said.entropy_A)
        if self._centralized and section.kl_coef > 0:
            loss_A = loss_A + self.kl_coef * k3_kl(said.logprob_A, before.reference.get(batch))
        if not self._centralized:
            value_A = self.critics[agent.index](said.hidden_AD)
            value_loss_A = clipped_value(
                value_A,
                before.value.get(batch),
                before.returns.get(batch),
                section.value_clip_range,
            )
            stats.add(value_loss=value_loss_A)
            loss_A = loss_A + value_loss_A
        stats.add(loss=loss_A)
        return loss_A.sum() / tokens, stats

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

    def _adapt_kl(self, metrics: Mapping[str, float], joint_actions: int) -> None:
        """kl_coef ← kl_coef · (1 + clip(KL / target − 1, ±0.2) · n / horizon) (Ziegler 2019)."""
        target = self.section.kl_target
        if target is not None:
            error = max(-0.2, min(0.2, metrics["kl"] / target - 1))
            self.kl_coef *= 1 + error * joint_actions / self.section.kl_horizon

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def state_tensors(self) -> dict[str, Mapping[str, torch.Tensor]]:
        tensors: dict[str, Mapping[str, torch.Tensor]] = dict(self.team.state_tensors())
        for i, optimizer in enumerate(self.optimizers):
            tensors[f"optimizer_{i}"] = optimizer.state_tensors()
        for i, (critic, optimizer) in enumerate(
            zip(self.critics, self.critic_optimizers, strict=True)
        ):
            tensors[f"critic_{i}"] = critic.state_dict()
            tensors[f"critic_optimizer_{i}"] = optimizer.state_tensors()
        return tensors

    def load(
        self, state: Mapping[str, Any], tensors: Mapping[str, dict[str, torch.Tensor]]
    ) -> None:
        self.kl_coef = float(state["kl_coef"])
        self.team.load_tensors(tensors)
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_tensors(tensors[f"optimizer_{i}"])
        for i, (critic, optimizer) in enumerate(
            zip(self.critics, self.critic_optimizers, strict=True)
        ):
            critic.load_state_dict(tensors[f"critic_{i}"])
            optimizer.load_tensors(tensors[f"critic_optimizer_{i}"])
