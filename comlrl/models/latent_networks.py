"""SHPPO's generated layer and its networks (arXiv 2404.03869), for agents that share one policy.

An agent's pooled prompt o_i and its memory h_i determine a latent l_i ~ N(μ_i, σ_i), from which a
small layer before the language-model head is generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import nn

from comlrl.run_files import HETEROGENEOUS

WEIGHTS, SIZES = "model.safetensors", "config.json"
Latents = Literal["learned", "zero", "sampled"]


class HeterogeneousLayer(nn.Module):
    """h ← h + B · tanh(w_i · (A · h) + b_i), with (w_i, b_i) = decoder(l_i).

    A and B are shared. B starts at zero, so that the initial policy is the base.
    """

    def __init__(self, width: int, latent_dim: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.A = nn.Linear(width, rank, bias=False)
        self.B = nn.Linear(rank, width, bias=False)
        self.decoder = nn.Linear(latent_dim, rank * rank + rank)
        nn.init.zeros_(self.B.weight)

    def forward(self, hidden_AD: torch.Tensor, latent_AK: torch.Tensor) -> torch.Tensor:
        """Transform hidden states by their latents: (A, width), (A, latent_dim) → (A, width)."""
        generated = self.decoder(latent_AK)
        weight_ARR = generated[:, : self.rank**2].view(-1, self.rank, self.rank)
        bias_AR = generated[:, self.rank**2 :]
        down_AR = self.A(hidden_AD.to(self.A.weight.dtype))
        inner_AR = torch.tanh(torch.einsum("aij,aj->ai", weight_ARR, down_AR) + bias_AR)
        return hidden_AD + self.B(inner_AR).to(hidden_AD.dtype)


class LatentEncoder(nn.Module):
    """Encoder of observation and memory into a latent, shared by all agents.

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
        with torch.no_grad():  # σ starts near 0.13: observations outweigh noise
            self.latent_net[-1].bias[latent_dim:] = -2.0  # type: ignore[operator]

    def forward(
        self, observation_XD: torch.Tensor, memory_XH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return μ_i, σ_i of shape (X, latent_dim), and h_i^t, from o_i and h_i^{t−1}."""
        projected = self.projection(self.norm(observation_XD.detach()))
        mu, spread = self.latent_net(torch.cat([projected, memory_XH], dim=-1)).chunk(2, dim=-1)
        sigma = nn.functional.softplus(spread) + 1e-5
        return mu, sigma, self.memory(projected, memory_XH)

    def along_chains(
        self, observation_SND: torch.Tensor, parent_S: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return μ, σ of shape (S, N, latent_dim) for consecutive states, gradients included.

        ``parent_S``: the state one turn before, earlier in the list, or −1 at the first turn.
        """
        states, agents, width = observation_SND.shape
        if states == 0:  # a process without tasks still takes the gradient step
            blank = observation_SND.new_zeros(0, self.hidden)
            mu, sigma, _ = self(observation_SND.view(0, width), blank)
            return mu.view(0, agents, mu.shape[-1]), sigma.view(0, agents, sigma.shape[-1])
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
    """V_I(s, {μ_i, σ_i}) = mean_i MLP(s, μ_i, σ_i): predicts the team's return under these latents.

    s is the mean over agents of tanh(projection(LN(o_i))), so that any number of agents works.
    """

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
        """Return values, shape (S,)."""
        state_SH = self.state(observation_SND).mean(1)
        state_SNH = state_SH[:, None].expand(-1, observation_SND.shape[1], -1)
        return self.value(torch.cat([state_SNH, mu_SNK, sigma_SNK], dim=-1))[..., 0].mean(1)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Let gradients flow through the module but not into its parameters."""
    wanted = [p.requires_grad for p in module.parameters()]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, trained in zip(module.parameters(), wanted, strict=True):
            parameter.requires_grad_(trained)


class HeterogeneousPolicy(nn.Module):
    """The parts that differentiate the agents of a shared policy: encoder and generated layer.

    If ``latents`` is not learned, the encoder is neither trained nor used: l_i is 0, or ~ N(0, 1).
    """

    def __init__(
        self, width: int, latent_dim: int, hidden: int, rank: int, latents: Latents = "learned"
    ) -> None:
        super().__init__()
        self.latents = latents
        self.sizes = {"width": width, "latent_dim": latent_dim, "hidden": hidden, "rank": rank}
        self.layer = HeterogeneousLayer(width, latent_dim, rank)
        self.encoder = LatentEncoder(width, hidden, latent_dim)

    def distribution(
        self, observation_XD: torch.Tensor, memory_XH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return μ_i, σ_i of N(μ_i, σ_i), (X, latent_dim), from which l_i is drawn; and h_i."""
        if self.latents == "learned":
            return self.encoder(observation_XD, memory_XH)
        zero = memory_XH.new_zeros(len(memory_XH), self.sizes["latent_dim"])
        return zero, zero + (self.latents == "sampled"), memory_XH

    def save(self, folder: Path) -> None:
        """Write ``folder/heterogeneous/``: safetensors, and sizes and ``latents`` as JSON."""
        target = folder / HETEROGENEOUS
        target.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        save_file(tensors, str(target / WEIGHTS))
        settings = self.sizes | {"latents": self.latents}
        (target / SIZES).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
