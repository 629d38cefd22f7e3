"""Prompts, completions and sampling settings."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Message:
    """One message in an agent's conversation; a prompt is a tuple of messages.

    With the role ``tools``, ``content`` is a JSON list of tools, which the chat template renders.
    """

    role: Literal["system", "user", "assistant", "tool", "tools"]
    content: str
    # written by the user who configured the run: its special tokens are encoded as such
    verbatim: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """The tokens that top-k and top-p left to sample from at each of L positions.

    A set of more than ``Sampling.max_support`` tokens is stored as a threshold for recomputed
    log-probabilities, half-way between the least likely token that was left and the likeliest that
    was removed.
    """

    counts_L: torch.Tensor  # int32: number of ids at each position
    ids_I: torch.Tensor  # int32: ids of all positions, concatenated
    threshold_L: torch.Tensor  # float32: log-probability before truncation; +∞ where ids are stored


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """SHPPO: an agent's latent at one state, stored on the CPU from the rollout to the update."""

    observation_D: torch.Tensor  # the pooled prompt
    epsilon_K: torch.Tensor  # standard normal; zeros if sampling was greedy
    value_K: torch.Tensor  # μ + σ ε; fixed for the importance ratios of all epochs
    mu_K: torch.Tensor
    memory_H: torch.Tensor  # recurrent state after this turn


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of an agent."""

    text: str  # decoded without special tokens, up to the stop text if one was sampled
    # every sampled token, including end-of-sequence and the tokens of a stop text
    token_ids: tuple[int, ...]
    finished: bool  # True: ended by end-of-sequence or a stop text; False: cut at max_new_tokens
    # log-probability of all tokens under the sampling distribution; NaN: unknown, or greedy.
    # Not compared, as rounding depends on the batch.
    logprob: float = field(default=math.nan, compare=False)
    # Weight in the agent's gradient if the sampling distribution is not the trained policy.
    _: KW_ONLY
    importance: float = field(default=1.0, compare=False)
    # log-probability of each token; empty if ``logprob`` is NaN
    logprob_L: tuple[float, ...] = field(default=(), compare=False, repr=False)
    # SHPPO: the latent that the agent acted under, shared by all siblings
    latent: Latent | None = field(default=None, compare=False, repr=False)
    # of each token, on the CPU; None: nothing was truncated, or no policy learns from it
    support: SamplingSupport | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None
    _: KW_ONLY
    stop: tuple[str, ...] = ()  # texts that end a completion, in addition to end-of-sequence
    max_support: int | None = (
        None  # most ids per position in ``Completion.support``; None: no support is stored
    )
    # settings of each agent if they differ; the fields above then apply to no agent
    by_agent: tuple[Sampling, ...] = ()

    def for_agent(self, agent: int) -> Sampling:
        """Return this agent's sampling settings."""
        return self.by_agent[agent] if self.by_agent else self

    @property
    def truncates(self) -> bool:
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    def limits(self, agents: int) -> tuple[int, ...]:
        """Return ``max_new_tokens`` of each of the first ``agents`` agents."""
        return tuple(self.for_agent(agent).max_new_tokens for agent in range(agents))

    @property
    def longest(self) -> int:
        """The largest ``max_new_tokens`` of any agent."""
        return max(
            (settings.max_new_tokens for settings in self.by_agent), default=self.max_new_tokens
        )

    def with_sets(self, max_support: int | None) -> Sampling:
        """Return the settings with this ``max_support`` for all agents."""
        by_agent = tuple(replace(settings, max_support=max_support) for settings in self.by_agent)
        return replace(self, max_support=max_support, by_agent=by_agent)

    def with_stops(self, stop: tuple[str, ...]) -> Sampling:
        """Return the settings with these stop texts added for all agents."""
        if not stop:
            return self
        by_agent = tuple(agent.with_stops(stop) for agent in self.by_agent)
        return replace(self, stop=tuple(dict.fromkeys(self.stop + stop)), by_agent=by_agent)

    @property
    def greedy(self) -> Sampling:
        """Greedy settings with the same limits and stop texts."""
        by_agent = tuple(settings.greedy for settings in self.by_agent)
        return Sampling(0.0, self.max_new_tokens, stop=self.stop, by_agent=by_agent)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to complete once for each key; a key seeds the sampling of one completion."""

    prompt_ids: tuple[int, ...]
    keys_G: tuple[tuple[Any, ...], ...]
    before: Latent | None = None  # SHPPO: the agent's latent at the previous turn
    _: KW_ONLY
    latent_K: torch.Tensor | None = None  # SHPPO: the latent that all siblings are sampled under
    task_id: str = ""  # prompts of the same task share a prefix
