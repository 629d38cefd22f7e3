"""Log-probabilities of a step's tokens that stay as they are while the policy moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comlrl.models.agent import Agent
from comlrl.models.logprobs import ActionLogprobs
from comlrl.models.team import Team
from comlrl.types import Row, TokenBatch
from comlrl.update.accumulate import measure_all
from comlrl.update.per_token import PerToken


class OldLogprobs:
    """Log-probabilities under π_old, before the step's first update, and under the reference."""

    def __init__(
        self,
        team: Team,
        agent: Agent,
        read: Callable[[TokenBatch], ActionLogprobs],
        read_reference: Callable[[Agent, TokenBatch], ActionLogprobs],
    ) -> None:
        """Set up the reader. ``read``: under the present policy; ``read_reference``: under the
        reference."""
        self.team, self.agent, self.read, self.read_reference = team, agent, read, read_reference
        self.policy, self.reference = PerToken(), PerToken()

    def measure(
        self,
        rows: Sequence[Row],
        *,
        reference: bool = False,
        also: Callable[[TokenBatch, ActionLogprobs], None] | None = None,
    ) -> None:
        """Read a minibatch before other minibatches move the policy. ``also`` sees every batch."""

        def measure(batch: TokenBatch) -> None:
            policy = self.read(batch)
            self.policy.put(batch, policy.logprob_A)
            if also is not None:
                also(batch, policy)
            if reference:
                self.reference.put(batch, self._reference_logprob(batch))

        measure_all(self.agent, rows, measure, self.team.run_parallel)

    def of_policy(self, batch: TokenBatch, logprob_A: torch.Tensor) -> torch.Tensor:
        """Return π_old's log-probabilities, (A,): those of the first pass over these tokens,
        which ``logprob_A`` may be."""
        return self.policy.once(batch, lambda: logprob_A)

    def of_reference(self, batch: TokenBatch) -> torch.Tensor:
        """Return the reference's log-probabilities, (A,), read once."""
        return self.reference.once(batch, lambda: self._reference_logprob(batch))

    def _reference_logprob(self, batch: TokenBatch) -> torch.Tensor:
        with torch.no_grad(), self.team.reference(self.agent.index) as reference:
            return self.read_reference(reference, batch).logprob_A
