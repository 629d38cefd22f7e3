"""PPO for language agents (arXiv 1707.06347); with num_agents > 1 IPPO (2011.09533) or MAPPO
(2103.01955), and with turns as the unit actor-critics as in CoLLM (2601.21972).

Objective of a policy π over the tokens a of a minibatch, ρ_a = π(a) / π_old(a):

    L = −mean_a w_t min(ρ_a Â_a, clip(ρ_a, 1 ± ε) Â_a) − c_H · mean_a H_a  [+ kl_coef · mean_a k3_a]
    V's: mean ½ max((V − R)², (clip(V, V_old ± ε_v) − R)²)

Three choices, each a key:

- ``critic``, what V reads: ``independent``, what its own agent reads; ``centralized``, what all do.
- ``granularity``, what one value and one advantage are of: each ``token``, with γ gamma_token
  within a turn and discount, once, between turns; or a whole ``turn``, whose Â goes to all of its
  tokens. A turn's reward comes with its end; Â is GAE along a chain, which ends with its task;
  R = Â + V_old. Centralized values are of turns: within one, agents do not see each other's tokens.
- ``kl_in``, where kl_coef is paid: off the ``reward``, kl_coef · (log π_old − log π_ref) of each
  token, summed up where values are of turns, and over all agents where they are centralized; or as
  a k3 term in the ``loss``.

Where each agent has its own reward (``Score.by_agent``), R and Â are of that, a centralized V
has a head for each agent, and each pays for its own KL alone.

V is a small head on the policy's hidden states (of the token, or their mean over a turn's prompts),
or with ``critic_model`` a language model with its own adapter and a scalar head, which reads
the histories themselves. With ``shared_policy`` all agents act by one policy, which learns from the
samples of all, and an independent critic is one for all; their prompts distinguish them.

With ``turn_order: sequential`` each agent's turns are one chain, and its V reads what it
has read of this turn too. A centralized V of agent i reads the prompts of the agents up to i: those
of later agents hold what i is about to write, and Â would no longer tell what that is worth.

With a program each call is a turn. An agent's calls in an episode are one chain, and its
rewards are its own (``agents.reward``, ``discount`` counts its calls): a centralized V has a head
for each agent, and each agent pays for its own KL. V of a call reads each agent's latest prompt up
to the call and none that was asked later. A minibatch's states are tasks with all their episodes.
An agent without a call in a step is not updated in it.

Old log-probabilities and values are taken of all policies before the first update, over the first
epoch's own minibatches, so that the first minibatch's ratios are exactly 1; where credit does not
need those of the first minibatch, its own update reads them. Rollouts are chains: G
samples at turn 1, one at each turn after it.

Departures: small heads do not train the policy (their input's gradient is stopped), so that each
critic has its own optimizer and no coefficient; advantages are standardized over the step's tokens
of a policy (``normalize_advantages``). Where ``entropy_coef`` is 0 the entropy that is logged is
the estimate −log π of the samples.
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
    """One policy in one training step: with the completions of the agents that act by it."""

    rows_S: list[list[Row]]  # of each state
    policy: PolicyUpdate
    values: StepValues  # of the critic that credits it
    metrics: dict[str, float]

    def rows(self, states: Sequence[int]) -> list[Row]:
        return [row for s in states for row in self.rows_S[s]]

    def acted(self) -> bool:
        """Return whether the policy chose any token. A collective call."""
        return distributed.total(sum(sum(row.chosen) for rows in self.rows_S for row in rows)) > 0

    def loss(self, batch: TokenBatch, policy: ActionLogprobs, sums: Sums) -> torch.Tensor:
        """Compute the policy's loss of each token, and that of a head on its states."""
        loss_A = self.policy.loss(batch, policy, sums)
        if self.values.head is not None:
            loss_A = loss_A + self.values.shared_loss(batch, policy, sums)
        return loss_A


class PPOTrainer:
    """Value chains of decisions, improve each policy for some epochs, and the critics."""

    def __init__(
        self,
        section: PPOConfig,
        team: Team,
        rollout: Player,
        loop: Loop,
        sampling: Sampling,
        critic_team: Team | None = None,
    ) -> None:
        """Set up the trainer. ``critic_team``: the language models of ``critic_model``, one for
        each critic."""
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling, self.kl = sampling, KLCoefficient(section)
        by_agent = rollout.returns_by_agent
        self.critics = TeamCritics(
            section, team, critic_team, seed=rollout.seed, returns_by_agent=by_agent
        )
        # of each policy that is trained
        self.optimizers = [policy_optimizer(section, team, i) for i in team.trained]

    def train(self) -> None:
        self.loop.train(self)

    def parts(self) -> Mapping[str, Part]:
        parts: dict[str, Part] = {**self.team.parts(), "kl_coef": self.kl}
        optimizers = zip(self.team.trained, self.optimizers, strict=True)
        parts |= {f"optimizer_{i}": optimizer for i, optimizer in optimizers}
        return {**parts, **self.critics.parts()}

    def credit(self, rolled: Rolled) -> list[Improvement]:
        """Return each policy with its advantages: all policies and critics are read before the
        first update."""
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
        """Update the policies and the critics; return metrics, bare (means) and of each agent."""
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
        """Return epochs over the step's states; ``name``: whose order of minibatches it is."""
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
        """Measure what a policy, its reference and a head on its states say of the samples."""
        section, deal = self.section, rolled.deal
        critic = values[0 if self.critics.centralized else self.critics.policies.index(index)]
        rows_S = rolled.decisions.rows(self.critics.acting(index), section.weight_T)
        key = (self.rollout.seed, "minibatches", rolled.index, 0)
        first = minibatches(rolled.decisions.states_B, section.train_batch_size, key, deal)
        if critic.head is None and not self._kl_in_reward:
            # Credit does not need the first minibatch, which is read by its own update.
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
        """Compute what the rewards lose: kl_coef · (log π_old − log π_ref), of tokens, or summed
        up over a completion (independent, or of an agent's individual reward) or over all
        agents' (centralized)."""
        section, paid = self.section, PerToken()
        if not self._kl_in_reward:
            return None
        for policy in (improvement.policy for improvement in policies):
            for number, logprob_L in policy.old.of_completion.items():
                reference_L = policy.reference.of_completion[number]
                paid.of_completion[number] = self.kl.value * (logprob_L - reference_L)
        if section.granularity == "token":
            return paid
        summed, of_turn = PerToken(), paid.of_completion  # those of untrained agents pay nothing
        for number, decision in enumerate(decisions.numbered):
            if number not in of_turn and self.team.actor(decision.agent).trained:
                continue  # a completion without tokens
            others = [number]
            if self.critics.centralized and not self.rollout.returns_by_agent:
                first = number - decisions[number].agent  # of its joint action
                others = [*range(first, first + section.num_agents)]
            parts = [of_turn[n] for n in others if n in of_turn]
            like = of_turn.get(number, parts[0] if parts else torch.zeros(1))
            sums = [part.to(like).sum() for part in parts or [like]]
            summed.of_completion[number] = torch.stack(sums).sum()[None]
        return summed

    def _update(self, place: int, improvement: Improvement, rolled: Rolled) -> dict[str, float]:
        """Make some epochs of clipped updates of a policy, and of a head on its states. ``place``:
        among the trained."""
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
        """Standardize advantages over the step's tokens as they are trained on; return their
        first moments too."""
        advantage = policy.advantage.flat()
        _, mean, deviation = moments(advantage)
        if self.section.normalize_advantages:
            policy.advantage = policy.advantage.like((advantage - mean) / (deviation + 1e-8))
        return {"advantage_mean": mean, "advantage_std": deviation}
