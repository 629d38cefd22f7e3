"""The input of an update: rows of token ids with their weights, and packed batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from comlrl.types.sampling import Completion, SamplingSupport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of one agent and completions of it, each with a coefficient and a number."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]  # token ids of each
    weights: tuple[float, ...]  # coefficient of each on each of its tokens
    indices: tuple[int, ...]  # the caller's number for each
    _: KW_ONLY
    support: tuple[SamplingSupport, ...] = ()  # of each; empty: they were chosen from all tokens
    # π/μ of each, which is in ``weights`` already; empty: 1
    importances: tuple[float, ...] = ()
    # Leading tokens of each that continue its prompt and were not chosen; empty: none
    contexts: tuple[int, ...] = ()

    @classmethod
    def from_completions(
        cls,
        prompt_ids: tuple[int, ...],
        completions: Sequence[Completion],
        weights: Iterable[float],
        indices: Iterable[int],
    ) -> Row:
        """Return completions as they were sampled, their weights times their importance."""
        ids = tuple(completion.token_ids for completion in completions)
        weight_C = tuple(
            w * completion.importance for w, completion in zip(weights, completions, strict=True)
        )
        support = tuple(
            completion.support for completion in completions if completion.support is not None
        )
        importances = importances_of(completions)
        return cls(
            prompt_ids, ids, weight_C, tuple(indices), support=support, importances=importances
        )

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.completions))

    @property
    def chosen(self) -> tuple[int, ...]:
        """The number of tokens of each completion that the policy chose."""
        contexts = self.contexts or (0,) * len(self.completions)
        return tuple(
            len(ids) - context for ids, context in zip(self.completions, contexts, strict=True)
        )

    def part(self, start: int, end: int) -> Row:
        """Return these of its completions."""
        span = slice(start, end)
        return Row(
            self.prompt_ids, self.completions[span], self.weights[span], self.indices[span],
            support=self.support[span], importances=self.importances[span],
            contexts=self.contexts[span],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Packed rows of one agent. A row is one node's prompt followed by its completions.

    ``segment_RL``: −1 padding, 0 prompt, s ≥ 1 the s-th completion of the row. A token sees the
    prompt and its own segment up to itself. ``action_mask_RL`` marks the tokens that the policy
    chose (end-of-sequence included; padding and ``Row.contexts`` never); the distribution that
    chose token (r, l) is the one at row r, column ``previous_RL[r, l]``.
    """

    token_ids_RL: torch.Tensor  # int64
    positions_RL: torch.Tensor  # int64, restarted after the prompt for each segment
    segment_RL: torch.Tensor  # int64
    previous_RL: torch.Tensor  # int64
    action_mask_RL: torch.Tensor  # bool
    weight_RL: torch.Tensor  # float64: a completion's coefficient on each of its tokens
    completion_RL: torch.Tensor  # int64: index of the completion that a token belongs to, or −1
    support: SamplingSupport | None = None  # of each action; None: each was chosen from all tokens
    importance_A: torch.Tensor | None = None  # float64: π/μ of each action's completion; None: 1

    def corrected(self, value_A: torch.Tensor) -> torch.Tensor:
        """Weight the sampled actions' values; the expectation is then under the trained policy."""
        if self.importance_A is None:
            return value_A
        return value_A * self.importance_A.to(value_A)


def importances_of(completions: Sequence[Completion]) -> tuple[float, ...]:
    """Return π/μ of each completion; empty if all were drawn by the trained policy."""
    importances = tuple(completion.importance for completion in completions)
    return importances if any(importance != 1 for importance in importances) else ()
