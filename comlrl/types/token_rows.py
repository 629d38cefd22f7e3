"""The input of an update: rows of weighted token ids, and packed batches of such rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from comlrl.types.sampling import Completion, SamplingSupport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of one agent and its completions; the other fields have a value for each."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]  # token ids
    weights: tuple[float, ...]  # loss coefficient of every token of the completion
    indices: tuple[int, ...]  # the caller's number for the completion
    _: KW_ONLY
    support: tuple[SamplingSupport, ...] = ()  # empty: sampled from the full vocabulary
    # π/μ, already included in ``weights``; empty: 1
    importances: tuple[float, ...] = ()
    # number of leading tokens that belong to the prompt and were not sampled; empty: 0
    contexts: tuple[int, ...] = ()

    @classmethod
    def from_completions(
        cls,
        prompt_ids: tuple[int, ...],
        completions: Sequence[Completion],
        weights: Iterable[float],
        indices: Iterable[int],
    ) -> Row:
        """Build a row from sampled completions; multiply their weights by their importance."""
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
        """Number of tokens of each completion that the policy sampled."""
        contexts = self.contexts or (0,) * len(self.completions)
        return tuple(
            len(ids) - context for ids, context in zip(self.completions, contexts, strict=True)
        )

    def part(self, start: int, end: int) -> Row:
        """Return a row with only the completions ``start`` to ``end`` (exclusive)."""
        span = slice(start, end)
        return Row(
            self.prompt_ids, self.completions[span], self.weights[span], self.indices[span],
            support=self.support[span], importances=self.importances[span],
            contexts=self.contexts[span],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Packed rows of one agent. A row is one node's prompt followed by its completions.

    ``segment_RL`` is −1 for padding, 0 for the prompt and s ≥ 1 for the s-th completion of the
    row. A token attends to the prompt and, causally, to its own segment. ``action_mask_RL`` marks
    the tokens that the policy sampled: end-of-sequence tokens too, but neither padding nor
    ``Row.contexts``. The logits for token (r, l) are at row r, column ``previous_RL[r, l]``.
    """

    token_ids_RL: torch.Tensor  # int64
    positions_RL: torch.Tensor  # int64; each completion continues from the end of the prompt
    segment_RL: torch.Tensor  # int64
    previous_RL: torch.Tensor  # int64
    action_mask_RL: torch.Tensor  # bool
    weight_RL: torch.Tensor  # float64: loss coefficient of the token's completion
    completion_RL: torch.Tensor  # int64: index of the token's completion, or −1
    support: SamplingSupport | None = None  # of the A actions; None: the full vocabulary
    importance_A: torch.Tensor | None = None  # float64: π/μ of the action's completion; None: 1

    def corrected(self, value_A: torch.Tensor) -> torch.Tensor:
        """Weight values of actions by π/μ, so that their mean estimates that under π."""
        if self.importance_A is None:
            return value_A
        return value_A * self.importance_A.to(value_A)


def importances_of(completions: Sequence[Completion]) -> tuple[float, ...]:
    """Return π/μ of each completion, or an empty tuple if all of them are 1."""
    importances = tuple(completion.importance for completion in completions)
    return importances if any(importance != 1 for importance in importances) else ()
