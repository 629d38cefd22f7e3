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
samples of all, and an independent critic is one for all; their prompts tell them apart.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from comlrl.config.algorithms import PPOConfig
from comlrl.credit.call_chains import CallChains, call_chains_of
from comlrl.credit.chains import Chains, Group, chains_of
from comlrl.loop.loop import Loop
from comlrl.loop.parts import Part
from comlrl.loop.steps import Step
from comlrl.models.agent import Agent
from comlrl.models.critics import (
    LanguageCritic,
    TeamCritic,
    TokenCritic,
    hidden_width,
    observations,
)
from comlrl.models.logprobs import ActionLogprobs, action_logprobs
from comlrl.models.team import Team
from comlrl.processes.distributed import Processes
from comlrl.processes.statistics import Sums, agent_means, moments, standardized
from comlrl.programs.rollout import ProgramRollout
from comlrl.rollout.grow import Rollout
from comlrl.types import EpisodeGroup, RolloutResult, Row, Sampling, TokenBatch, Tree
from comlrl.update.clipped import ClippedPolicy, run_epochs
from comlrl.update.kl_coefficient import KLCoefficient
from comlrl.update.minibatches import Span, minibatches, passes
from comlrl.update.optimizer import optimizer_of, policy_optimizer
from comlrl.update.per_token import PerToken
from comlrl.update.values import LanguageReader, PooledReader, StepValues, history_rows

Critic = TokenCritic | TeamCritic | LanguageCritic
Credited = Chains | CallChains


@dataclass
class Improvement:
    """One policy in one training step: with the completions of the agents that act by it."""

    rows_S: list[list[Row]]  # of each state
    policy: ClippedPolicy
    values: StepValues  # of the critic that credits it
    metrics: dict[str, float]

    def rows(self, states: Sequence[int]) -> list[Row]:
        return [row for s in states for row in self.rows_S[s]]

    def acted(self, processes: Processes) -> bool:
        """Whether the policy chose any token. A collective call."""
        return processes.total(sum(sum(row.chosen) for rows in self.rows_S for row in rows)) > 0


class PPOTrainer:
    """Grow chains, value and credit them, improve each policy for some epochs, and the critics."""

    def __init__(
        self,
        section: PPOConfig,
        team: Team,
        rollout: Rollout | ProgramRollout,
        loop: Loop,
        sampling: Sampling,
        critic_team: Team | None = None,
    ) -> None:
        """``critic_team``: the language models of ``critic_model``, one for each critic."""
        self.section, self.team, self.rollout, self.loop = section, team, rollout, loop
        self.sampling, self.kl = sampling, KLCoefficient(section)
        self.critic_team = critic_team
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rollout.seed)
            self.critics = [self._critic(index) for index in range(section.critics)]
        self.optimizers = [policy_optimizer(section, team, i) for i in range(len(team))]
        self.critic_optimizers = [
            optimizer_of(
                section,
                critic.parameters(),
                section.value_learning_rate,
                index,
                processes=team.processes,
            )
            for index, critic in enumerate(self.critics)
        ]

    def _critic(self, index: int) -> Critic:
        apart = self._centralized and self._own_rewards
        heads = self.section.num_agents if apart else 1
        if self.critic_team is not None:
            return LanguageCritic(self.critic_team.agents[index], heads)
        agent = self.team.agents[index]
        if self.section.granularity == "token":
            return TokenCritic(hidden_width(agent)).to(agent.device)
        return TeamCritic(hidden_width(agent), heads=heads).to(agent.device)

    def train(self) -> None:
        for step in self.loop.steps(self):
            self.step(step)

    def parts(self) -> Mapping[str, Part]:
        parts: dict[str, Part] = {**self.team.parts(), "kl_coef": self.kl}
        parts |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        parts |= {f"critic_{i}": critic for i, critic in enumerate(self.critics)}
        return parts | {f"critic_optimizer_{i}": o for i, o in enumerate(self.critic_optimizers)}

    def step(self, step: Step) -> None:
        """Grow, credit, update, record."""
        tasks, key = self.team.processes.shard(step.tasks), step.key
        trees = self.rollout.grow(tasks, self.section.shape, self.sampling, key)
        gathered = self.loop.gather(step, trees)
        metrics = self._improve(_credited(trees), step.index, gathered.span)
        if self.section.kl_target is not None and "kl" in metrics:
            self.kl.adapt(metrics["kl"], gathered.scored)
        metrics["learning_rate"] = self.optimizers[0].learning_rate
        self.loop.record(step, gathered, updates=int(metrics.pop("updates")), metrics=metrics)

    def _improve(self, chains: Credited, step: int, span: Span) -> dict[str, float]:
        """Measure all policies and credit them, then update them and the critics; metrics bare
        (means) and of each agent."""
        values = self._values(chains)
        policies = [self._measured(index, chains, values, step) for index in range(len(self.team))]
        critic_metrics = self._credit(chains, policies, values)
        acted = [one.acted(self.team.processes) for one in policies]
        for index, one in enumerate(policies):
            if not acted[index]:
                continue
            one.metrics |= self._standardize(one.policy)
            with self.team.acting(index):
                one.metrics |= self._update(index, one, chains, step, span)
        size, epochs = self.section.train_batch_size, self.section.ppo_epochs
        key = (self.rollout.seed, "critic", step)
        for own, metrics, optimizer in zip(
            values, critic_metrics, self.critic_optimizers, strict=True
        ):
            if own.reader is not None and self.team.processes.total(own.count) > 0:
                parts = passes(chains.states_B, size, epochs, key, span, self.team.processes)
                metrics["value_loss"] = own.learn(optimizer, parts)
        of_team = critic_metrics[0] if self._centralized else {}
        if not self._centralized:
            for one, metrics in zip(policies, critic_metrics, strict=True):
                one.metrics |= metrics
        of_team["updates"] = max(one.metrics.pop("updates", 0) for one in policies)
        return agent_means([one.metrics for one in policies]) | of_team

    @property
    def _centralized(self) -> bool:
        return self.section.critic == "centralized"

    @property
    def _own_rewards(self) -> bool:
        """Whether each agent has its own return; an episode's calls always give it one."""
        return isinstance(self.rollout, ProgramRollout) or self.rollout.own_rewards

    @property
    def _kl_in_reward(self) -> bool:
        return self.section.kl_in == "reward" and self.section.kl_coef > 0

    def _acting(self, index: int) -> Sequence[int]:
        """The agents that act by a policy, or of whom an independent critic is."""
        agents = range(self.section.num_agents)
        return agents if self.section.shared_policy else agents[index : index + 1]

    def _valued(self, index: int) -> Sequence[int]:
        """The agents whom a critic credits."""
        return range(self.section.num_agents) if self._centralized else self._acting(index)

    def _values(self, chains: Credited) -> list[StepValues]:
        """Each critic's values of the step, and what it reads where it has its own passes."""
        seen_PD = None
        if self.section.granularity == "turn" and self.critic_team is None:
            seen_PD = self._observations(chains)
        return [
            StepValues(
                self.section,
                self.team.processes,
                self._reader(index, chains, seen_PD),
                critic if isinstance(critic, TokenCritic) else None,
                gamma_token=self.section.gamma_token,
            )
            for index, critic in enumerate(self.critics)
        ]

    def _reader(
        self, index: int, chains: Credited, seen_PD: torch.Tensor | None
    ) -> PooledReader | LanguageReader | None:
        """What a critic with its own passes reads; None: it is a head in the policy's passes."""
        critic, agents = self.critics[index], self._valued(index)
        groups = [Group([agent], [agent]) for agent in agents]
        if self._centralized:
            stages = self.section.shape.stages
            groups = [Group(range(stage.stop), stage) for stage in stages]
        if isinstance(critic, LanguageCritic):
            assert self.critic_team is not None
            rows_S = chains.rows(agents, self.section.weight_T)
            if self.section.granularity == "turn":
                rows_S = history_rows(critic.agent, chains, groups)
            return LanguageReader(critic, self.critic_team, chains, rows_S)
        if isinstance(critic, TeamCritic):
            assert seen_PD is not None
            return PooledReader(critic, chains, seen_PD, groups)
        return None

    def _measured(
        self, index: int, chains: Credited, values: Sequence[StepValues], step: int
    ) -> Improvement:
        """What a policy, its reference and a head on its states say of the samples."""
        section, temperature = self.section, self.sampling.of(index).temperature
        own = values[0 if self._centralized else index]
        key = (self.rollout.seed, "minibatches", step, 0)
        rows_S = chains.rows(self._acting(index), self.section.weight_T)
        with self.team.acting(index) as agent:

            def logprobs(batch: TokenBatch) -> ActionLogprobs:
                return action_logprobs(agent, batch, temperature, entropy=section.entropy_coef > 0)

            def reference_logprobs(start: Agent, batch: TokenBatch) -> ActionLogprobs:
                return action_logprobs(start, batch, temperature)

            kl_in_loss = self.kl.value if section.kl_in == "loss" and section.kl_coef > 0 else 0.0
            policy = ClippedPolicy(
                section, self.team, agent, logprobs, reference_logprobs, kl_in_loss
            )
            one = Improvement(rows_S, policy, own, {})
            first = minibatches(chains.states_B, section.train_batch_size, key, self.team.processes)
            # Where credit does not need it, the first minibatch is read by its own update.
            needed = own.head is not None or self._kl_in_reward
            see = None if own.head is None else own.see
            policy.measure([one.rows(states) for states in first[0 if needed else 1 :]], see)
        if section.kl_coef > 0:
            one.metrics["kl_coef"] = self.kl.value
        return one

    def _credit(
        self, chains: Credited, policies: Sequence[Improvement], values: Sequence[StepValues]
    ) -> list[dict[str, float]]:
        """Advantages into the policies; what the log wants of each critic."""
        metrics = []
        penalty = self._penalty(chains, policies)
        for index, own in enumerate(values):
            numbered = chains.numbered(self._valued(index))
            advantage = own.credit(numbered, chains.reward, penalty)
            for one in policies:
                if one.values is own:
                    one.policy.credit(advantage, one.rows(range(len(one.rows_S))))
            metrics.append({"explained_variance": own.explained_variance()})
        return metrics

    def _penalty(self, chains: Credited, policies: Sequence[Improvement]) -> PerToken | None:
        """What the rewards lose: kl_coef · (log π_old − log π_ref), of tokens, or summed up over a
        completion (independent, or of an agent's own reward) or over all agents' (centralized)."""
        section, paid = self.section, PerToken()
        if not self._kl_in_reward:
            return None
        for one in policies:
            old, reference_of = one.policy.old, one.policy.old.reference.of_completion
            for number, own in old.policy.of_completion.items():
                paid.of_completion[number] = self.kl.value * (own - reference_of[number])
        if section.granularity == "token":
            return paid
        whole, of_turn = PerToken(), paid.of_completion
        for number, own in of_turn.items():
            others = [number]
            if self._centralized and not self._own_rewards and isinstance(chains, Chains):
                agents, (action, _) = range(section.num_agents), chains.origin(number)
                others = [chains.number(action, agent) for agent in agents]
            parts = [of_turn[n].to(own) for n in others]
            whole.of_completion[number] = torch.stack([part.sum() for part in parts]).sum()[None]
        return whole

    def _update(
        self, index: int, one: Improvement, chains: Credited, step: int, span: Span
    ) -> dict[str, float]:
        """Some epochs of clipped updates of a policy, and of a head on its states."""
        section, optimizers, value_loss = self.section, [self.optimizers[index]], None
        if one.values.head is not None:
            optimizers.append(self.critic_optimizers[index])
            value_loss = one.values.shared_loss

        def update(chosen: list[int], sums: Sums, progress: float) -> float:
            return one.policy.update(one.rows(chosen), optimizers, sums, progress, value_loss)

        key = (self.rollout.seed, "minibatches", step)
        epochs = passes(
            chains.states_B,
            section.train_batch_size,
            section.ppo_epochs,
            key,
            span,
            self.team.processes,
        )
        return (
            run_epochs(self.team.processes, epochs, section.target_kl, update) | one.policy.before()
        )

    def _standardize(self, policy: ClippedPolicy) -> dict[str, float]:
        """Advantages over the step's tokens as they are trained on; their first moments."""
        advantage = policy.advantage.flat()
        _, mean, deviation = moments(advantage, self.team.processes)
        if self.section.normalize_advantages:
            own = standardized(advantage, self.team.processes)
            policy.advantage = policy.advantage.like(own)
        return {"advantage_mean": mean, "advantage_std": deviation}

    @torch.no_grad()
    def _observations(self, chains: Credited) -> torch.Tensor:
        """What was read for each of the chains' prompts, as its agent's policy pools it;
        (P, width)."""
        prompts = chains.prompts
        seen_PD = torch.zeros(
            len(prompts), hidden_width(self.team.agents[0]), device=self.team.device
        )
        for index in range(len(self.team)):
            with self.team.acting(index) as agent:
                for i in self._acting(index):
                    places = [place for place, (reader, _) in enumerate(prompts) if reader == i]
                    read = [prompts[place][1].prompt_ids for place in places]
                    seen_PD[places] = observations(agent, read).to(self.team.device)
        return seen_PD


def _credited(rolled: Sequence[RolloutResult]) -> Credited:
    """A step's rollouts, numbered. A process whose shard is empty has no chains."""
    groups = [group for group in rolled if isinstance(group, EpisodeGroup)]
    trees = [tree for tree in rolled if isinstance(tree, Tree)]
    return call_chains_of(groups) if groups else chains_of(trees)
