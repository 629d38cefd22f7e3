"""Prompts, completions, and how their tokens are drawn."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an agent's own conversation; a prompt is a tuple of them.

    ``tools``: not a message but a list of tools in JSON, for the chat template to show.
    """

    role: Literal["system", "user", "assistant", "tool", "tools"]
    content: str
    # written by whoever configured the run: control tokens in it are control tokens
    verbatim: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """The tokens that top-k and top-p left at each of L positions: what the policy chose from.

    A set of more than ``Sampling.max_support`` tokens has no ids. Its threshold lies half-way
    between the last token that was left and the first that was not: whoever reads it takes the
    tokens that are likelier than that by its own probabilities.
    """

    counts_L: torch.Tensor  # int32: ids of each position
    ids_I: torch.Tensor  # int32: all positions' ids, one after the other
    threshold_L: torch.Tensor  # float32: log-probability before truncation; +∞ where there are ids


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """SHPPO: who an agent was at one state, kept from the rollout to the update. On the CPU."""

    observation_D: torch.Tensor  # its prompt, pooled
    epsilon_K: torch.Tensor  # standard normal; zeros where sampling was greedy
    value_K: torch.Tensor  # μ + σ ε: the ratios of all epochs use this very one
    mu_K: torch.Tensor
    memory_H: torch.Tensor  # after this turn


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of an agent."""

    text: str  # decoded without special tokens; where a text stopped it, what stands before that
    # every sampled token: the end-of-sequence token included, and those of the text that stopped it
    token_ids: tuple[int, ...]
    finished: bool  # True: ended by itself or by a text; False: cut at max_new_tokens
    # log-probability of all its tokens under what drew them; not a number: unknown, or greedy.
    # Up to rounding, which depends on the batch: not compared.
    logprob: float = field(default=math.nan, compare=False)
    # Its weight in its agent's gradient, where another than the trained policy has drawn it.
    _: KW_ONLY
    importance: float = field(default=1.0, compare=False)
    # log-probability of each token; empty where ``logprob`` is not a number
    logprob_L: tuple[float, ...] = field(default=(), compare=False, repr=False)
    # SHPPO: what the agent acted under, one for all siblings
    latent: Latent | None = field(default=None, compare=False, repr=False)
    # of each token, on the CPU; None: nothing was truncated, or nobody learns from it
    support: SamplingSupport | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None
    _: KW_ONLY
    stop: tuple[str, ...] = ()  # texts that end a completion beside the model's own end
    max_support: int | None = (
        None  # tokens of a set in ``Completion.support``; None: no sets are stored
    )
    # of each agent, where not all sample alike; the fields above are then no agent's own
    by_agent: tuple[Sampling, ...] = ()

    def for_agent(self, agent: int) -> Sampling:
        """Return this agent's sampling settings."""
        return self.by_agent[agent] if self.by_agent else self

    @property
    def truncates(self) -> bool:
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    def limits(self, agents: int) -> tuple[int, ...]:
        """Return ``max_new_tokens`` of each of so many agents."""
        return tuple(self.for_agent(agent).max_new_tokens for agent in range(agents))

    @property
    def longest(self) -> int:
        """Tokens of any agent's longest completion."""
        return max(
            (settings.max_new_tokens for settings in self.by_agent), default=self.max_new_tokens
        )

    def with_sets(self, max_support: int | None) -> Sampling:
        """Return the settings with another ``max_support``, for all agents."""
        by_agent = tuple(replace(settings, max_support=max_support) for settings in self.by_agent)
        return replace(self, max_support=max_support, by_agent=by_agent)

    def with_stops(self, stop: tuple[str, ...]) -> Sampling:
        """Return the same with these stops beside its own, for all agents."""
        if not stop:
            return self
        by_agent = tuple(agent.with_stops(stop) for agent in self.by_agent)
        return replace(self, stop=tuple(dict.fromkeys(self.stop + stop)), by_agent=by_agent)

    @property
    def greedy(self) -> Sampling:
        """The likeliest tokens, with the same limits and stops."""
        by_agent = tuple(settings.greedy for settings in self.by_agent)
        return Sampling(0.0, self.max_new_tokens, stop=self.stop, by_agent=by_agent)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be completed once for each key; a key identifies a completion's randomness."""

    prompt_ids: tuple[int, ...]
    keys_G: tuple[tuple[Any, ...], ...]
    before: Latent | None = None  # SHPPO: the agent's at the turn before
    _: KW_ONLY
    latent_K: torch.Tensor | None = None  # SHPPO: what the siblings are sampled under
    task_id: str = ""  # of the task, whose prompts begin alike
