"""Values stored by token, independently of batching, and advantages of tokens and turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comlrl.credit.advantages import gae
from comlrl.types import TokenBatch


class PerToken:
    """A value for each token of each completion, or one for the whole completion, stored
    independently of how rows are batched."""

    def __init__(self) -> None:
        self.of_completion: dict[int, torch.Tensor] = {}

    def put(self, batch: TokenBatch, value_A: torch.Tensor) -> None:
        completion_A = batch.completion_RL[batch.action_mask_RL]
        numbers, counts = torch.unique_consecutive(completion_A, return_counts=True)
        parts = value_A.detach().split(counts.tolist())
        self.of_completion.update(zip(numbers.tolist(), parts, strict=True))

    def get(self, batch: TokenBatch) -> torch.Tensor:
        """Return the values in the batch's order of actions; shape (A,)."""
        return self.at(completions(batch))

    def at(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the values of these completions, concatenated."""
        return torch.cat([self.of_completion[number] for number in numbers])

    def once(self, batch: TokenBatch, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the values as ``get`` does. If any is missing, store those of ``make`` for the
        batch first."""
        numbers = set(batch.completion_RL[batch.action_mask_RL].tolist())
        if not numbers <= self.of_completion.keys():
            self.put(batch, make())
        return self.get(batch)

    def flat(self) -> torch.Tensor:
        """Return all values, concatenated in order of the completions' numbers."""
        parts = [self.of_completion[number] for number in sorted(self.of_completion)]
        return torch.cat(parts) if parts else torch.zeros(0)

    def like(self, flat: torch.Tensor) -> PerToken:
        """Return a ``PerToken`` of other values for the same tokens, in the order of ``flat()``."""
        other, numbers = PerToken(), sorted(self.of_completion)
        parts = flat.split([len(self.of_completion[number]) for number in numbers])
        other.of_completion = dict(zip(numbers, parts, strict=True))
        return other


def completions(batch: TokenBatch) -> list[int]:
    """Return the numbers of a batch's completions, in the order of its actions."""
    return torch.unique_consecutive(batch.completion_RL[batch.action_mask_RL]).tolist()


def advantages_of(
    chains: Sequence[Sequence[int]],
    reward: Callable[[int], float],
    value: PerToken,
    penalty: PerToken | None,
    *,
    gamma_token: float,
    discount: float,
    gae_lambda: float,
) -> tuple[PerToken, PerToken]:
    """Compute GAE along chains of completions, over tokens or, if each has one value, over turns;
    return the advantages A and the returns A + V.

    ``reward`` (completion number → reward) is added at a turn's last token, and ``penalty`` is
    subtracted at every token. γ is ``gamma_token`` within a turn, and ``discount`` from its last
    token to the first of the next turn.
    """
    advantages, returns = PerToken(), PerToken()
    for chain in chains:
        values = [value.of_completion[c] for c in chain]
        lengths = [len(part) for part in values]
        values_L = torch.cat(values)
        rewards_L = torch.zeros_like(values_L)
        if penalty is not None:
            penalties_L = torch.cat([penalty.of_completion[c] for c in chain])
            rewards_L -= penalties_L.to(rewards_L.device)  # a critic may be on another device
        discounts_L = torch.full_like(values_L, gamma_token)
        last = -1
        for c, length in zip(chain, lengths, strict=True):
            last += length
            rewards_L[last] += reward(c)
            discounts_L[last] = discount
        advantages_L = gae(rewards_L, values_L, discounts_L, gae_lambda)
        advantages.of_completion.update(zip(chain, advantages_L.split(lengths), strict=True))
        returns_L = advantages_L + values_L
        returns.of_completion.update(zip(chain, returns_L.split(lengths), strict=True))
    return advantages, returns
