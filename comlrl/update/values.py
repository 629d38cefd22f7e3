"""A critic in one training step: its values before the update, its target returns, and its
training passes. Values are stored by the number of the completion that they credit: one for each
token, or one for the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from comlrl.config.algorithms import ActorCriticConfig
from comlrl.credit.decisions import Decisions, View
from comlrl.errors import NonFiniteError
from comlrl.models.agent import Agent
from comlrl.models.critics import LanguageCritic, TeamCritic, TokenCritic
from comlrl.models.logprobs import ActionLogprobs
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.processes.statistics import Sums, explained_variance
from comlrl.types import Row, TokenBatch
from comlrl.update.accumulate import accumulate, measure_all
from comlrl.update.losses import clipped_value
from comlrl.update.minibatches import Pass
from comlrl.update.optimizer import AgentOptimizer
from comlrl.update.per_token import PerToken, advantages_of, completions

# (completions' numbers, their values) → (loss summed over the values, sums for the log)
Loss = Callable[[Sequence[int], torch.Tensor], tuple[torch.Tensor, Sums]]

CRITIC = "the critic (its rate is value_learning_rate)"


class StepValues:
    """One critic's values in one training step and the returns that it fits, with the loss

    ½ max((V − R)², (clip(V, V_old ± ε_v) − R)²)   for each value
    """

    def __init__(
        self,
        section: ActorCriticConfig,
        reader: PooledReader | LanguageReader | None,
        head: TokenCritic | None = None,
        *,
        gamma_token: float = 1.0,
    ) -> None:
        """Set up the values of either ``reader``, a critic with separate passes, or ``head``, on
        the policy's hidden states in the policy's own passes (``see``, ``shared_loss``).
        ``gamma_token`` is the discount between the tokens of a turn."""
        self.section, self.reader, self.head, self.gamma_token = section, reader, head, gamma_token
        self.value, self.returns = PerToken(), PerToken()  # from before the update

    def see(self, batch: TokenBatch, policy: ActionLogprobs) -> None:
        """Store the head's values from the policy's pass before its update."""
        assert self.head is not None
        self.value.put(batch, self.head(policy.hidden_AD))

    def credit(
        self,
        chains: Sequence[Sequence[int]],
        reward: Callable[[int], float],
        penalty: PerToken | None,
    ) -> PerToken:
        """Compute advantages by GAE along chains of completions' numbers; ``penalty`` is subtracted
        from the rewards. Raises NonFiniteError if a value is not finite."""
        if self.reader is not None:
            self.value = self.reader.measure()
        if not self.value.flat().isfinite().all():
            raise NonFiniteError(f"a value of {CRITIC} is not finite")
        section = self.section
        advantage, self.returns = advantages_of(
            chains,
            reward,
            self.value,
            penalty,
            gamma_token=self.gamma_token,
            discount=section.discount,
            gae_lambda=section.gae_lambda,
        )
        return advantage

    @property
    def count(self) -> int:
        """Number of values in this process."""
        return len(self.value.flat())

    def explained_variance(self) -> float:
        return explained_variance(self.value.flat(), self.returns.flat())

    def shared_loss(self, batch: TokenBatch, policy: ActionLogprobs, sums: Sums) -> torch.Tensor:
        """Compute the head's loss for each token in the policy's pass; shape (A,)."""
        assert self.head is not None
        loss_A = self._loss(completions(batch), self.head(policy.hidden_AD))
        sums.add(value_loss=loss_A)
        return loss_A

    def learn(self, optimizer: AgentOptimizer, epochs: Iterable[Pass]) -> float:
        """Train on the passes' minibatches of states; return the mean loss over all values."""
        total, count = 0.0, 0
        try:
            for epoch in epochs:
                for states, progress in epoch.minibatches:
                    loss, values = self.descend(optimizer, states, progress)
                    total, count = total + loss, count + values
        except NonFiniteError as error:
            raise NonFiniteError(f"in {CRITIC}, {error}", error.batch, error.agent) from error
        return total / count

    def descend(
        self, optimizer: AgentOptimizer, states: Sequence[int], progress: float
    ) -> tuple[float, int]:
        """Make one optimizer step on the mean loss over a minibatch of states; return the summed
        loss and the number of values, both over all processes."""
        assert self.reader is not None
        optimizer.zero()
        local_count = sum(len(self.value.of_completion[n]) for n in self.reader.numbers(states))
        count = max(1, int(distributed.total(local_count)))

        def loss(numbers: Sequence[int], value_A: torch.Tensor) -> tuple[torch.Tensor, Sums]:
            loss_A = self._loss(numbers, value_A)
            return loss_A.sum() / count, Sums(loss=loss_A)

        sums = self.reader.backward(states, loss)
        optimizer.step(progress)
        return distributed.total(sums.totals["loss"]), count

    def _loss(self, numbers: Sequence[int], value_A: torch.Tensor) -> torch.Tensor:
        old, returns = self.value.at(numbers), self.returns.at(numbers)
        return clipped_value(value_A, old, returns, self.section.value_clip_range)


class PooledReader:
    """A small critic of turns, whose inputs are the policies' pooled states of their prompts."""

    def __init__(
        self,
        critic: TeamCritic,
        decisions: Decisions,
        seen_PD: torch.Tensor,
        views_S: Sequence[Sequence[View]],
    ) -> None:
        """Set up the reader. ``seen_PD``: pooled states of ``decisions.prompts``. ``views_S``: the
        views of each state."""
        self.critic, self.decisions, self.seen_PD = critic, decisions, seen_PD
        sizes = {len(view.read) for views in views_S for view in views}
        self.most, self.alike = max(sizes, default=0), len(sizes) < 2
        place = {number: p for p, number in enumerate(decisions.prompts)}
        # decisions of each state in order, each with the prompts that its value is computed from
        self.read_S = [
            sorted(
                (number, tuple(place[d] for d in view.read))
                for view in views
                for number in view.numbers
            )
            for views in views_S
        ]

    def measure(self) -> PerToken:
        """Compute all values, without gradients."""
        states, value = range(len(self.read_S)), PerToken()
        with torch.no_grad():
            parts = self._values(states).split(1)
        value.of_completion.update(zip(self.numbers(states), parts, strict=False))
        return value

    def numbers(self, states: Sequence[int]) -> list[int]:
        """Return the numbers of the decisions that are valued in these states."""
        return [number for s in states for number, _ in self.read_S[s]]

    def backward(self, states: Sequence[int], loss: Loss) -> Sums:
        """Accumulate gradients of a loss on the values of these states."""
        numbers = self.numbers(states)
        if not numbers:  # a process may have no part of a minibatch
            return Sums()
        value, sums = loss(numbers, self._values(states))
        value.backward()
        return sums

    def _values(self, states: Sequence[int]) -> torch.Tensor:
        numbered = [entry for s in states for entry in self.read_S[s]]
        agents = [self.decisions[number].agent for number, _ in numbered]
        # Pad shorter sets with prompt 0, which ``count_C`` excludes.
        filled = [[*read, *[0] * (self.most - len(read))] for _, read in numbered]
        place_CN = torch.tensor(filled, dtype=torch.long).view(len(filled), self.most)
        count_C = None
        if not self.alike:
            count_C = torch.tensor([len(read) for _, read in numbered], device=self.seen_PD.device)
        return self.critic(self.seen_PD[place_CN], torch.tensor(agents, dtype=torch.long), count_C)


class LanguageReader:
    """A language model as critic: a value at each position where a completion's token is chosen."""

    def __init__(
        self,
        critic: LanguageCritic,
        team: Team,
        decisions: Decisions,
        rows_S: Sequence[Sequence[Row]],
    ) -> None:
        """Set up the reader. ``team``: the team of critics. ``rows_S``: the rows of each state,
        indexed by decision."""
        self.critic, self.team, self.rows_S = critic, team, rows_S
        agents = [decision.agent for decision in decisions.numbered]
        self.agent_D = torch.tensor(agents, dtype=torch.long)

    def measure(self) -> PerToken:
        value = PerToken()
        with self.team.acting(self.critic.agent.index) as agent:
            rows = [row for rows in self.rows_S for row in rows]
            concurrent = self.team.run_parallel
            measure_all(agent, rows, lambda batch: value.put(batch, self._value(batch)), concurrent)
        return value

    def numbers(self, states: Sequence[int]) -> list[int]:
        return [number for s in states for row in self.rows_S[s] for number in row.indices]

    def backward(self, states: Sequence[int], loss: Loss) -> Sums:
        sums = Sums()
        with self.team.acting(self.critic.agent.index) as agent:
            accumulate(
                agent,
                [row for s in states for row in self.rows_S[s]],
                lambda batch: loss(completions(batch), self._value(batch)),
                sums,
                parameters=self.critic.parameters(),
                concurrent=self.team.run_parallel,
            )
        return sums

    def _value(self, batch: TokenBatch) -> torch.Tensor:
        number_A = batch.completion_RL[batch.action_mask_RL]
        return self.critic(batch, self.agent_D.to(number_A.device)[number_A])


def history_rows(
    critic: Agent, decisions: Decisions, views_S: Sequence[Sequence[View]]
) -> list[list[Row]]:
    """Build the input of a language-model critic that values turns: for each state and view a row
    with the concatenated histories, followed by one dummy token for each decision to value, so
    that its value is computed where the histories end. Histories that are too long for the model
    keep their last tokens.
    """
    rows_S = []
    for views in views_S:
        rows = []
        for view in views:
            room = (critic.context_length - 1) // len(view.read)
            read = [critic.encode(decisions[d].prompt)[-room:] for d in view.read]
            ends = ((critic.stop_ids[0],),) * len(view.numbers)
            history = tuple(token for ids in read for token in ids)
            rows.append(Row(history, ends, (1.0,) * len(view.numbers), view.numbers))
        rows_S.append(rows)
    return rows_S
