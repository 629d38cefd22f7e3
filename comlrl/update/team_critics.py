"""PPO's critics, one for each policy or one for the team. They turn a step's rewards into
advantages, and fit the returns, in separate passes unless they share the policy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from comlrl.config.algorithms import PPOConfig
from comlrl.credit.decisions import Decisions
from comlrl.errors import UserError
from comlrl.models.critics import (
    LanguageCritic,
    TeamCritic,
    TokenCritic,
    hidden_width,
    observations,
)
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.update.minibatches import Pass
from comlrl.update.optimizer import AgentOptimizer, optimizer_of
from comlrl.update.values import LanguageReader, PooledReader, StepValues, history_rows

Critic = TokenCritic | TeamCritic | LanguageCritic


class TeamCritics:
    """The critics of each policy (independent) or of the team (centralized): small heads on the
    policies' hidden states, or language models with ``critic_model``."""

    def __init__(
        self,
        section: PPOConfig,
        team: Team,
        language_team: Team | None,
        *,
        seed: int,
        returns_by_agent: bool,
    ) -> None:
        """Set up the critics. ``language_team``: a language model of ``critic_model`` for each
        critic. ``returns_by_agent``: whether a centralized critic needs a head for each agent."""
        self.section, self.team, self.language_team = section, team, language_team
        self.centralized = section.critic == "centralized"
        self.policies = (0,) if self.centralized else team.trained  # policy index of each critic
        heads = section.num_agents if self.centralized and returns_by_agent else 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.networks = [self._network(index, heads) for index in self.policies]
        self.optimizers: list[AgentOptimizer] = [
            optimizer_of(
                section,
                network.parameters(),
                section.value_learning_rate,
                index,
            )
            for index, network in zip(self.policies, self.networks, strict=True)
        ]

    def _network(self, index: int, heads: int) -> Critic:
        if self.language_team is not None:
            return LanguageCritic(self.language_team.agents[index], heads)
        agent = self.team.agents[index]
        if self.section.granularity == "token":
            return TokenCritic(hidden_width(agent)).to(agent.device)
        widths = {hidden_width(agent) for agent in self.team.agents}
        if self.centralized and len(widths) > 1:
            raise UserError(
                "ppo.critic: 'centralized' reads the hidden states of all agents, whose widths "
                f"differ ({', '.join(map(str, sorted(widths)))}); set ppo.critic_model, or use "
                "ppo.critic=independent"
            )
        return TeamCritic(hidden_width(agent), heads=heads).to(agent.device)

    def parts(self) -> Mapping[str, Critic | AgentOptimizer]:
        """Return the parts that a checkpoint stores."""
        networks = zip(self.policies, self.networks, strict=True)
        optimizers = zip(self.policies, self.optimizers, strict=True)
        return {
            **{f"critic_{i}": network for i, network in networks},
            **{f"critic_optimizer_{i}": optimizer for i, optimizer in optimizers},
        }

    def acting(self, index: int) -> Sequence[int]:
        """Return the agents that act by policy ``index``: those of its independent critic."""
        agents = range(self.section.num_agents)
        return agents if self.section.shared_policy else agents[index : index + 1]

    def credited(self, index: int) -> Sequence[int]:
        """Return the agents that a critic assigns advantages to."""
        return range(self.section.num_agents) if self.centralized else self.acting(index)

    def values(self, decisions: Decisions) -> list[StepValues]:
        """Return the step's ``StepValues`` of each critic, with a reader if its passes are
        separate."""
        return [
            StepValues(
                self.section,
                self._reader(index, network, decisions),
                network if isinstance(network, TokenCritic) else None,
                gamma_token=self.section.gamma_token,
            )
            for index, network in zip(self.policies, self.networks, strict=True)
        ]

    def learn(
        self, values: Sequence[StepValues], epochs: Callable[[], Iterator[Pass]]
    ) -> list[dict[str, float]]:
        """Train the critics whose passes are separate; return metrics of every critic."""
        metrics = [{"explained_variance": critic.explained_variance()} for critic in values]
        of_all = zip(values, metrics, self.networks, self.optimizers, strict=True)
        for critic, of_critic, network, optimizer in of_all:
            if critic.reader is not None and distributed.total(critic.count) > 0:
                of_critic["value_loss"] = critic.learn(optimizer, epochs())
            if isinstance(network, TeamCritic):
                network.returns.add(critic.returns.flat()[:, None])
        return metrics

    def _reader(
        self, index: int, critic: Critic, decisions: Decisions
    ) -> PooledReader | LanguageReader | None:
        """Return the reader of a critic with separate passes; None for a head that is trained in
        the policy's passes."""
        agents = self.credited(index)
        if isinstance(critic, LanguageCritic):
            assert self.language_team is not None
            if self.section.granularity == "token":
                rows_S = decisions.rows(agents, self.section.weight_T)
            else:
                views_S = decisions.views(agents, self.centralized)
                rows_S = history_rows(critic.agent, decisions, views_S)
            return LanguageReader(critic, self.language_team, decisions, rows_S)
        if isinstance(critic, TeamCritic):
            seen_PD = self._observations(index, decisions)
            views_S = decisions.views(agents, self.centralized)
            reads = [decisions[number].agent in agents for number in decisions.prompts]
            critic.observe(seen_PD[torch.tensor(reads, dtype=torch.bool)])
            return PooledReader(critic, decisions, seen_PD, views_S)
        return None

    @torch.no_grad()
    def _observations(self, index: int, decisions: Decisions) -> torch.Tensor:
        """Return the hidden states of each of ``decisions.prompts``, pooled by its agent's policy;
        shape (P, width). Those that the critic of policy ``index`` does not read are 0."""
        prompts = decisions.prompts
        width = hidden_width(self.team.agents[index])
        seen_PD = torch.zeros(len(prompts), width, device=self.team.device)
        for policy in range(len(self.team)) if self.centralized else [index]:
            with self.team.acting(policy) as agent:
                for i in self.acting(policy):
                    places = [p for p, number in enumerate(prompts) if decisions[number].agent == i]
                    read = [decisions[prompts[place]].prompt_ids for place in places]
                    seen_PD[places] = observations(agent, read).to(self.team.device)
        return seen_PD
