"""Cross-play: the last agent of each run paired with the other agents of every run.

Teams that can coordinate only with themselves form a bright diagonal (Hu et al. 2020, other-play).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from comlrl.types import Completion, Request, RolloutResult, Sampler, Sampling

if TYPE_CHECKING:
    import torch

    from comlrl.models.team import Team

Weights = Mapping[str, dict[str, "torch.Tensor"]]  # ``agent_0``, … → its tensors


SILENCE = Completion("", (), finished=True)


class CachingSampler:
    """A sampler that caches completions, and returns empty ones for silent agents.

    With keyed sampling a completion depends only on weights, prompt and key. A run's agent thus
    writes the same at turn 1 in every pairing.
    """

    def __init__(self, sampler: Sampler, num_agents: int) -> None:
        self.sampler, self.token_texts = sampler, sampler.token_texts
        self.encode, self.fits = sampler.encode, sampler.fits
        self.weights_N: Sequence[str | None] = [""] * num_agents  # name of weights; None: silent
        self._completions: dict[tuple, tuple[Completion, ...]] = {}

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        keys_N = [
            [(agent, self.weights_N[agent], r.prompt_ids, r.keys_G, sampling) for r in requests]
            for agent, requests in enumerate(requests_N)
        ]
        for keys, requests, whose in zip(keys_N, requests_N, self.weights_N, strict=True):
            if whose is None:
                silent = [(SILENCE,) * len(r.keys_G) for r in requests]
                self._completions |= dict(zip(keys, silent, strict=True))
        new_N = [
            [
                (key, r)
                for key, r in zip(keys, requests, strict=True)
                if key not in self._completions
            ]
            for keys, requests in zip(keys_N, requests_N, strict=True)
        ]
        if any(new_N):
            sampled_N = self.sampler.sample([[r for _, r in new] for new in new_N], sampling)
            for new, sampled in zip(new_N, sampled_N, strict=True):
                self._completions |= {key: s for (key, _), s in zip(new, sampled, strict=True)}
        return [[self._completions[key] for key in keys] for keys in keys_N]


def play(
    team: Team,
    sampler: CachingSampler,
    weights_R: Sequence[Weights],
    grow: Callable[[], list[RolloutResult]],
) -> list[list[list[RolloutResult]]]:
    """Grow trees of each pairing, indexed ``[run of the others][run of the last agent]``. Changes
    the team's weights."""
    last = len(team) - 1
    rows = []
    for a, others in enumerate(weights_R):
        row = []
        for b, lasts in enumerate(weights_R):
            team.load_tensors({**others, f"agent_{last}": lasts[f"agent_{last}"]})
            sampler.weights_N = [str(a)] * last + [str(b)]
            row.append(grow())
        rows.append(row)
    return rows


def summary(matrix: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Compute the mean values of self-play and of cross-play, and the gap between them."""
    count = len(matrix)
    self_play = sum(matrix[i][i] for i in range(count)) / count
    others = [matrix[i][j] for i in range(count) for j in range(count) if i != j]
    cross_play = sum(others) / len(others)
    return {"self_play": self_play, "cross_play": cross_play, "gap": self_play - cross_play}
