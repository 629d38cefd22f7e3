"""SHPPO's generated layer and its networks (arXiv 2404.03869), for agents that share one policy.

What an agent reads decides who it is: its pooled prompt o_i and its own past h_i become a latent
l_i ~ N(μ_i, σ_i), and l_i generates a small layer before the language-model head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from comlrl.types import Completion, Message, Request, Sampler, Sampling

FOLDER, WEIGHTS, SIZES = "heterogeneous", "model.safetensors", "config.json"
Key = tuple[Any, ...]


class HeterogeneousLayer(nn.Module):
    """h ← h + B · tanh(w_i · (A · h) + b_i), with (w_i, b_i) = decoder(l_i).

    A and B are shared. B starts at zero, so that the first policy is the base.
    """

    def __init__(self, width: int, latent_dim: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.A = nn.Linear(width, rank, bias=False)
        self.B = nn.Linear(rank, width, bias=False)
        self.decoder = nn.Linear(latent_dim, rank * rank + rank)
        nn.init.zeros_(self.B.weight)

    def forward(self, hidden_AD: torch.Tensor, latent_AK: torch.Tensor) -> torch.Tensor:
        """Hidden states (A, width), each with its agent's latent (A, latent_dim) → (A, width)."""
        generated = self.decoder(latent_AK)
        weight_ARR = generated[:, : self.rank**2].view(-1, self.rank, self.rank)
        bias_AR = generated[:, self.rank**2 :]
        down_AR = self.A(hidden_AD.to(self.A.weight.dtype))
        inner_AR = torch.tanh(torch.einsum("aij,aj->ai", weight_ARR, down_AR) + bias_AR)
        return hidden_AD + self.B(inner_AR).to(hidden_AD.dtype)


class LatentEncoder(nn.Module):
    """Reading and memory → latent, shared by all agents.

    p_i = projection(LN(o_i)),   (μ_i, σ_i) = LatentNet(p_i, h_i^{t−1}),   σ = softplus + 1e−5
    h_i^t = GRU(p_i, h_i^{t−1}), zeros before turn 1
    """

    def __init__(self, width: int, hidden: int, latent_dim: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.projection = nn.Linear(width, hidden)
        self.memory = nn.GRUCell(hidden, hidden)
        self.latent_net = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 2 * latent_dim),
        )  # fmt: skip
        with torch.no_grad():  # σ starts near 0.13: what is read outweighs chance
            self.latent_net[-1].bias[latent_dim:] = -2.0  # type: ignore[operator]

    def forward(
        self, observation_XD: torch.Tensor, memory_XH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """o_i and h_i^{t−1} → μ_i, σ_i of shape (X, latent_dim), and h_i^t."""
        projected = self.projection(self.norm(observation_XD.detach()))
        mu, spread = self.latent_net(torch.cat([projected, memory_XH], dim=-1)).chunk(2, dim=-1)
        sigma = nn.functional.softplus(spread) + 1e-5
        return mu, sigma, self.memory(projected, memory_XH)

    def along_chains(
        self, observation_SND: torch.Tensor, parent_S: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """μ, σ of shape (S, N, latent_dim) for states that follow each other, gradients included.

        ``parent_S``: the state one turn before, earlier in the list, or −1 at the first turn.
        """
        states, agents, width = observation_SND.shape
        mus: dict[int, torch.Tensor] = {}
        sigmas: dict[int, torch.Tensor] = {}
        after: dict[int, torch.Tensor] = {}
        level = [s for s in range(states) if parent_S[s] < 0]
        while level:
            blank = observation_SND.new_zeros(agents, self.hidden)
            before = torch.cat([after.get(parent_S[s], blank) for s in level])
            mu, sigma, memory = self(observation_SND[level].view(-1, width), before)
            mus.update(zip(level, mu.split(agents), strict=True))
            sigmas.update(zip(level, sigma.split(agents), strict=True))
            after.update(zip(level, memory.split(agents), strict=True))
            done = set(level)
            level = [s for s in range(states) if parent_S[s] in done]
        order = range(states)
        return torch.stack([mus[s] for s in order]), torch.stack([sigmas[s] for s in order])


class InferenceNet(nn.Module):
    """V_I(s, {μ_i, σ_i}) = mean_i MLP(s, μ_i, σ_i): what the team's return will be with these
    latents. s is the mean over agents of projection(LN(o_i)), so that any N will do."""

    def __init__(self, width: int, hidden: int, latent_dim: int) -> None:
        super().__init__()
        self.state = nn.Sequential(
            nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, hidden), nn.Tanh()
        )
        self.value = nn.Sequential(
            nn.Linear(hidden + 2 * latent_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )

    def forward(
        self, observation_SND: torch.Tensor, mu_SNK: torch.Tensor, sigma_SNK: torch.Tensor
    ) -> torch.Tensor:
        """→ (S,)."""
        state_SH = self.state(observation_SND).mean(1)
        state_SNH = state_SH[:, None].expand(-1, observation_SND.shape[1], -1)
        return self.value(torch.cat([state_SNH, mu_SNK, sigma_SNK], dim=-1))[..., 0].mean(1)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Gradients flow through the module and none into its parameters."""
    wanted = [p.requires_grad for p in module.parameters()]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, trained in zip(module.parameters(), wanted, strict=True):
            parameter.requires_grad_(trained)


class HeterogeneousPolicy(nn.Module):
    """What makes agents out of the shared policy: the encoder, and the layer that it generates."""

    def __init__(self, width: int, latent_dim: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.sizes = {"width": width, "latent_dim": latent_dim, "hidden": hidden, "rank": rank}
        self.layer = HeterogeneousLayer(width, latent_dim, rank)
        self.encoder = LatentEncoder(width, hidden, latent_dim)

    def save(self, folder: Path) -> None:
        """Write ``folder/heterogeneous/``: safetensors, and the sizes as JSON."""
        target = folder / FOLDER
        target.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        save_file(tensors, str(target / WEIGHTS))
        (target / SIZES).write_text(json.dumps(self.sizes, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> HeterogeneousPolicy:
        """Read what ``save`` wrote. Raises OSError where there is nothing."""
        source = folder / FOLDER
        policy = cls(**json.loads((source / SIZES).read_text()))
        policy.load_state_dict(load_file(str(source / WEIGHTS)))
        return policy


@dataclass(frozen=True, slots=True)
class LatentSample:
    """What is kept of one agent at one state, from the rollout to the update."""

    observation_D: torch.Tensor
    epsilon_K: torch.Tensor
    latent_K: torch.Tensor  # μ + σ ε: the ratios of all epochs use this very one
    mu_K: torch.Tensor
    memory_H: torch.Tensor  # after this turn


class SharedSampler(Sampler, Protocol):
    """A sampler of one policy with a context of known length (``comlrl.generation.Generator``)."""

    max_length: int


class LatentSampler:
    """A Sampler that gives every request its agent's latent and samples all agents in one batch.

    ``taken`` holds the latents of the last rollout, by the request's key without its sample
    number: (…, task, path, agent). A rollout's first turn clears it.
    """

    def __init__(
        self,
        policy: HeterogeneousPolicy,
        inner: SharedSampler,
        observe: Callable[[Sequence[tuple[int, ...]]], torch.Tensor],
        normal: Callable[[Key, int], torch.Tensor],
    ) -> None:
        """``inner``: samples for agent 0, the shared policy, with ``policy.layer`` before its
        head. ``observe``: prompts → pooled hidden states (P, width). ``normal``: key and count →
        standard normal numbers that depend on the key alone."""
        self.policy, self.inner, self.observe, self.normal = policy, inner, observe, normal
        self.taken: dict[Key, LatentSample] = {}

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self.inner.max_length

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return self.inner.encode(0, prompt)

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return self.inner.fits(prompt_ids, sampling)

    @torch.no_grad()
    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Completions of each agent's requests, in order: one generation call for all agents."""
        flat = [request for requests in requests_N for request in requests]
        if not flat:
            return [[] for _ in requests_N]
        keys = [request.keys_G[0][:-1] for request in flat]
        if all(path_of(key) == () for key in keys):
            self.taken.clear()
        samples = self._latents(flat, keys, greedy=sampling.temperature == 0)
        self.taken.update(zip(keys, samples, strict=True))
        with_latents = [
            replace(request, latent=sample.latent_K)
            for request, sample in zip(flat, samples, strict=True)
        ]
        completions = iter(self.inner.sample([with_latents], sampling)[0])
        return [[next(completions) for _ in requests] for requests in requests_N]

    def _latents(
        self, requests: Sequence[Request], keys: Sequence[Key], *, greedy: bool
    ) -> list[LatentSample]:
        """Greedy sampling takes the mean latent."""
        encoder = self.policy.encoder
        observation = self.observe([request.prompt_ids for request in requests])
        blank = observation.new_zeros(encoder.hidden)
        memory = torch.stack([self._memory(key, blank) for key in keys])
        mu, sigma, after = encoder(observation, memory)
        if greedy:
            epsilon = torch.zeros_like(mu)
        else:
            epsilon = torch.stack([self.normal(key, mu.shape[1]) for key in keys]).to(mu)
        latent = mu + sigma * epsilon
        return [
            LatentSample(*parts)
            for parts in zip(observation, epsilon, latent, mu, after, strict=True)
        ]

    def _memory(self, key: Key, blank: torch.Tensor) -> torch.Tensor:
        """h_i^{t−1}: what this agent's turn before left behind."""
        path = path_of(key)
        if not path:
            return blank
        return self.taken[(*key[:-2], path[:-1], key[-1])].memory_H


def path_of(key: Key) -> tuple[int, ...]:
    """The joint actions that led to a state, from a key (…, task, path, agent)."""
    return key[-2]
