"""SHPPO's sampler, which adds the agent's latent to every request to the shared policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from comlrl.keyed import normals
from comlrl.models.critics import observations
from comlrl.models.latent_networks import HeterogeneousPolicy
from comlrl.rollout.generation import Generator
from comlrl.types import Completion, Message, Request, Sampling
from comlrl.types.sampling import Latent


class LatentSampler:
    """A Sampler that adds the agent's latent to every request, and batches all agents together.

    Completions store the latent with which they were sampled. At later turns, ``Request.before``
    is the agent's latent of the turn before.
    """

    def __init__(self, policy: HeterogeneousPolicy, inner: Generator) -> None:
        """Initialize. ``inner``: agent 0's sampler, with ``policy.layer`` before its head.

        Agent 0 is the shared policy.
        """
        self.policy, self.inner = policy, inner

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self.inner.max_length

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return self.inner.encode(0, prompt)

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return self.inner.fits(0, prompt_ids, sampling)

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        return self.inner.token_texts(0, token_ids)

    @torch.no_grad()
    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample completions of each agent's requests, in order.

        All agents with the same sampling settings share one generation call.
        """
        flat = [request for requests in requests_N for request in requests]
        if not flat:
            return [[] for _ in requests_N]
        latents = self._latents(flat, greedy=sampling.temperature == 0)
        conditioned = [
            replace(request, latent_K=latent.value_K)
            for request, latent in zip(flat, latents, strict=True)
        ]
        if sampling.by_agent:
            remaining = iter(conditioned)
            conditioned_N = [[next(remaining) for _ in requests] for requests in requests_N]
            groups = [*itertools.chain(*self.inner.sample(conditioned_N, sampling))]
        else:
            groups = self.inner.sample([conditioned], sampling)[0]
        carried = iter(
            tuple(replace(completion, latent=latent) for completion in completions_G)
            for completions_G, latent in zip(groups, latents, strict=True)
        )
        return [[next(carried) for _ in requests] for requests in requests_N]

    def _latents(self, requests: Sequence[Request], *, greedy: bool) -> list[Latent]:
        """Return latents from each prompt and its agent's memory; greedy uses the mean."""
        agent = self.inner.team.agents[0]
        observation = observations(agent, [request.prompt_ids for request in requests])
        blank = torch.zeros(self.policy.sizes["hidden"])
        memory = torch.stack([blank if r.before is None else r.before.memory_H for r in requests])
        mu, sigma, after = self.policy.distribution(observation, memory.to(observation))
        if greedy:
            epsilon = torch.zeros_like(mu)
        else:
            keys = [request.keys_G[0][:-1] for request in requests]  # without the sample's number
            epsilon = torch.stack([normals(key, mu.shape[1]) for key in keys]).to(mu)
        latent = mu + sigma * epsilon
        columns = (part.cpu() for part in (observation, epsilon, latent, mu, after))
        return [Latent(*parts) for parts in zip(*columns, strict=True)]
