"""PPO for language agents (arXiv 1707.06347); with num_agents > 1 IPPO (2011.09533) or MAPPO
(2103.01955), and with turns as the unit actor-critics as in CoLLM (2601.21972).

Objective of a policy π over the tokens a of a minibatch, ρ_a = π(a) / π_old(a):

    L = −mean_a w_t min(ρ_a Â_a, clip(ρ_a, 1 ± ε) Â_a) − c_H · mean_a H_a  [+ kl_coef · mean_a k3_a]
    V's: mean ½ max((V − R)², (clip(V, V_old ± ε_v) − R)²)

Three keys select the variant:

- ``critic``: V sees its agent's prompts (``independent``) or those of all (``centralized``).
- ``granularity``: one value and one advantage per ``token``, with discount gamma_token within a
  turn and ``discount`` once between turns; or per ``turn``, whose Â applies to all of its tokens. A
  turn's reward is given at its end; Â is GAE along a chain, which ends with its task;
  R = Â + V_old. Centralized values are per turn: within one, agents do not see each other's tokens.
- ``kl_in``: kl_coef weighs either a penalty subtracted from the ``reward``,
  kl_coef · (log π_old − log π_ref) per token, summed over the turn if values are per turn and over
  all agents if they are centralized; or a k3 term in the ``loss``.

If agents have individual rewards (``Score.by_agent``), R and Â are computed from them, a
centralized V has one head per agent, and each agent is penalized for its own KL only.

V is a small head on the policy's hidden states (of the token, or their mean over a turn's prompts).
With ``critic_model``, V is a language model with its own adapter and a scalar head, which sees
the histories themselves. With ``shared_policy``, all agents act by one policy, which learns from
all samples, and share one independent critic; their prompts distinguish them.

With ``turn_order: sequential``, each agent's turns form one chain, and its V also sees what the
agent has read in the current turn. A centralized V of agent i sees the prompts of the agents up to
i only: later prompts contain what i writes, so a V that saw them would be no baseline for it.

With a program, each call is a turn. An agent's calls in an episode form one chain with the agent's
own rewards (``agents.reward``; ``discount`` applies per call): a centralized V has one head per
agent, and each agent is penalized for its own KL only. V of a call sees each agent's latest prompt
up to the call, but no later one. The states of a minibatch are tasks with all their episodes. An
agent that makes no call in a step is not updated in it.

Old log-probabilities and values of all policies are computed before the first update, over the
first epoch's own minibatches, so the first minibatch's ratios are exactly 1. If credit does not
need those of the first minibatch, its update computes them. Rollouts are chains: G samples at
turn 1, one at each later turn.

Departures: small heads do not train the policy (the gradient of their input is stopped), so each
critic has its own optimizer and no coefficient; advantages are standardized over a policy's tokens
in the step (``normalize_advantages``). If ``entropy_coef`` is 0, the logged entropy is the sample
estimate −log π.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from comlrl.config.algorithms import PPOConfig
from comlrl.credit.decisions import Decisions
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Part, Player
from comlrl.loop.steps import Rolled
from comlrl.models.logprobs import ActionLogprobs, action_logprobs
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.processes.statistics import Sums, agent_means, moments
from comlrl.types import Row, Sampling, TokenBatch
from comlrl.update.kl_coefficient import KLCoefficient
from comlrl.update.minibatches import Pass, minibatches, passes
from comlrl.update.optimizer import policy_optimizer
from comlrl.update.per_token import PerToken
from comlrl.update.policy_update import PolicyUpdate, run_epochs
from comlrl.update.team_critics import TeamCritics
from comlrl.update.values import StepValues


@dataclass
class Improvement:
    """One policy's update in a training step, with the completions of the agents that use it."""

    rows_S: list[list[Row]]  # rows of each state
    policy: PolicyUpdate
    values: StepValues  # values of the policy's critic
    metrics: dict[str, float]

    def rows(self, states: Sequence[int]) -> list[Row]:
        return [row for s in states for row in self.rows_S[s]]

    def acted(self) -> bool:
        """Return whether the policy chose any token, in any process. A collective call."""
        return distributed.total(sum(sum(row.chosen) for rows in self.rows_S for row in rows)) > 0

    def loss(self, batch: TokenBatch, policy: ActionLogprobs, sums: Sums) -> torch.Tensor:
        """Compute the per-token loss of the policy, plus that of a value head on its states."""
        loss_A = self.policy.loss(batch, policy, sums)
        if self.values.head is not None:
            loss_A = loss_A + self.values.shared_loss(batch, policy, sums)
        return loss_A


class PPOTrainer:
    """Trainer that estimates advantages by GAE and runs clipped updates of policies and critics."""

    def __init__(
        self,
        section: PPOConfig,
        team: Team,
        rollout: Player,
        loop: Loop,
        sampling: Sampling,
        critic_team: Team | None = None,
    ) -> None:
        """Set up the trainer. ``critic_team``: the ``critic_model`` language models, one per
        critic."""
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling, self.kl = sampling, KLCoefficient(section)
        by_agent = rollout.returns_by_agent
        self.critics = TeamCritics(
            section, team, critic_team, seed=rollout.seed, returns_by_agent=by_agent
        )
        # one for each trained policy
        self.optimizers = [policy_optimizer(section, team, i) for i in team.trained]

    def train(self) -> None:
        self.loop.train(self)

    def parts(self) -> Mapping[str, Part]:
        parts: dict[str, Part] = {**self.team.parts(), "kl_coef": self.kl}
        optimizers = zip(self.team.trained, self.optimizers, strict=True)
        parts |= {f"optimizer_{i}": optimizer for i, optimizer in optimizers}
        return {**parts, **self.critics.parts()}

    def credit(self, rolled: Rolled) -> list[Improvement]:
        """Return each policy with its advantages. All policies and critics are evaluated before
        the first update."""
        decisions, critics = rolled.decisions, self.critics
        values = critics.values(decisions)
        policies = [self._measured(index, rolled, values) for index in self.team.trained]
        penalty = self._penalty(decisions, policies)
        for index, critic in zip(critics.policies, values, strict=True):
            chains = decisions.chains(critics.credited(index))
            advantage = critic.credit(chains, decisions.reward, penalty)
            for improvement in policies:
                if improvement.values is critic:
                    improvement.policy.credit(
                        advantage, improvement.rows(range(len(improvement.rows_S)))
                    )
        return policies

    def learn(self, rolled: Rolled, policies: Sequence[Improvement]) -> dict[str, float]:
        """Update the policies and the critics; return each agent's metrics and their means."""
        for place, improvement in enumerate(policies):
            if improvement.acted():
                improvement.metrics |= self._standardize(improvement.policy)
                with self.team.acting(improvement.policy.agent.index):
                    improvement.metrics |= self._update(place, improvement, rolled)
        values = list(dict.fromkeys(improvement.values for improvement in policies))
        of_critics = self.critics.learn(values, lambda: self._passes(rolled, "critic"))
        of_team = of_critics[0] if self.critics.centralized else {}
        if not self.critics.centralized:
            for improvement, metrics in zip(policies, of_critics, strict=True):
                improvement.metrics |= metrics
        of_team["updates"] = max(improvement.metrics.pop("updates", 0) for improvement in policies)
        metrics_N: list[dict[str, float]] = [{} for _ in self.team.agents]
        for improvement in policies:
            metrics_N[improvement.policy.agent.index] = improvement.metrics
        metrics = agent_means(metrics_N) | of_team
        if self.section.kl_target is not None and "kl" in metrics:
            self.kl.adapt(metrics["kl"], rolled.scored)
        return metrics | {"learning_rate": self.optimizers[0].learning_rate}

    def _passes(self, rolled: Rolled, name: str) -> Iterator[Pass]:
        """Yield the epochs over the step's states; ``name`` seeds the order of minibatches."""
        section = self.section
        return passes(
            rolled.decisions.states_B,
            section.train_batch_size,
            section.ppo_epochs,
            (self.rollout.seed, name, rolled.index),
            rolled.span,
            rolled.deal,
        )

    @property
    def _kl_in_reward(self) -> bool:
        return self.section.kl_in == "reward" and self.section.kl_coef > 0

    def _measured(self, index: int, rolled: Rolled, values: Sequence[StepValues]) -> Improvement:
        """Evaluate a policy, its reference and a value head on its states on the samples."""
        section, deal = self.section, rolled.deal
        critic = values[0 if self.critics.centralized else self.critics.policies.index(index)]
        rows_S = rolled.decisions.rows(self.critics.acting(index), section.weight_T)
        key = (self.rollout.seed, "minibatches", rolled.index, 0)
        first = minibatches(rolled.decisions.states_B, section.train_batch_size, key, deal)
        if critic.head is None and not self._kl_in_reward:
            # Credit does not need the first minibatch; its own update evaluates it.
            first = first[1:]
        reads = partial(action_logprobs, temperature=self.sampling.for_agent(index).temperature)
        kl_in_loss = self.kl.value if section.kl_in == "loss" and section.kl_coef > 0 else 0.0
        with self.team.acting(index) as agent:
            read = partial(reads, agent, entropy=section.entropy_coef > 0)
            policy = PolicyUpdate(section, self.team, agent, read, reads, kl_in_loss)
            improvement = Improvement(rows_S, policy, critic, {})
            see = None if critic.head is None else critic.see
            policy.measure([improvement.rows(states) for states in first], see)
        if section.kl_coef > 0:
            improvement.metrics["kl_coef"] = self.kl.value
        return improvement

    def _penalty(self, decisions: Decisions, policies: Sequence[Improvement]) -> PerToken | None:
        """Compute the penalty on the rewards, kl_coef · (log π_old − log π_ref): per token, or
        summed over a completion (independent critics, individual rewards) or over the completions
        of all agents (centralized)."""
        section, paid = self.section, PerToken()
        if not self._kl_in_reward:
            return None
        for policy in (improvement.policy for improvement in policies):
            for number, logprob_L in policy.old.of_completion.items():
                reference_L = policy.reference.of_completion[number]
                paid.of_completion[number] = self.kl.value * (logprob_L - reference_L)
        if section.granularity == "token":
            return paid
        summed, of_turn = PerToken(), paid.of_completion  # without those of untrained agents
        for number, decision in enumerate(decisions.numbered):
            if number not in of_turn and self.team.actor(decision.agent).trained:
                continue  # a completion without tokens
            others = [number]
            if self.critics.centralized and not self.rollout.returns_by_agent:
                first = number - decisions[number].agent  # the joint action's first completion
                others = [*range(first, first + section.num_agents)]
            parts = [of_turn[n] for n in others if n in of_turn]
            like = of_turn.get(number, parts[0] if parts else torch.zeros(1))
            sums = [part.to(like).sum() for part in parts or [like]]
            summed.of_completion[number] = torch.stack(sums).sum()[None]
        return summed

    def _update(self, place: int, improvement: Improvement, rolled: Rolled) -> dict[str, float]:
        """Run the epochs of clipped updates of a policy and of a value head on its states.
        ``place``: the policy's index among the trained ones."""
        optimizers = [self.optimizers[place]]
        if improvement.values.head is not None:
            optimizers.append(self.critics.optimizers[place])

        def update(chosen: list[int], sums: Sums, progress: float) -> float:
            return improvement.policy.update(
                improvement.rows(chosen), optimizers, sums, progress, improvement.loss
            )

        epochs = self._passes(rolled, "minibatches")
        metrics = run_epochs(epochs, self.section.target_kl, update)
        return metrics | improvement.policy.before()

    def _standardize(self, policy: PolicyUpdate) -> dict[str, float]:
        """Standardize the advantages over the step's tokens, if enabled; return their mean and
        standard deviation from before."""
        advantage = policy.advantage.flat()
        _, mean, deviation = moments(advantage)
        if self.section.normalize_advantages:
            policy.advantage = policy.advantage.like((advantage - mean) / (deviation + 1e-8))
        return {"advantage_mean": mean, "advantage_std": deviation}
