"""Which gradient teaches SHPPO's encoder what earns: a game whose true gradient is known.

    python benchmarks/latent_gradients.py [--seeds 3] [--steps 100]

Two agents share one policy that reads nothing but its latent, so that all it knows of its name and
of the task has to come through the encoder. Each of 16 tasks a step is one of two games with one
best cell (4, the next best 2); 8 joint actions are sampled under one pair of latents. Given the
latents the expected payoff is exact, and so is, up to the draws of ε, its gradient for the encoder.
A row of the Markdown table is a way to learn the encoder: the cosine between its gradient and the
true one over the run, and the expected payoff after it, mean ± standard error of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from comlrl.loggers.tables import table
from comlrl.models.critics import TeamCritic
from comlrl.models.latent_networks import HeterogeneousPolicy, InferenceNet, frozen
from comlrl.processes.statistics import standardized
from comlrl.update.losses import clipped_policy, latent_logprob

FIRST = torch.tensor([[1.0, 0, 0], [0, 0, 4], [0, 2, 0]])
PAYOFF_KAA = torch.stack([FIRST, FIRST.roll(1, 0)])
TASKS, SAMPLES, WIDTH, EPOCHS, CLIP = 16, 8, 8, 2, 0.2
WAYS = {  # what teaches the encoder → what V_I reads, and how many earlier steps it replays
    "nothing: as it began": None,
    "V_I of μ and σ (`inference`)": ("mean", 0),
    "V_I of μ and σ, replay": ("mean", 16),
    "V_I of the drawn latent": ("drawn", 0),
    "V_I of the drawn latent, replay": ("drawn", 16),
    "policy gradient (`policy`)": ("", 0),
}


class Players(nn.Module):
    """One policy for both: a constant, the generated layer and a head over three actions."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Parameter(0.5 * torch.randn(WIDTH)), nn.Linear(WIDTH, 3)
        self.networks = HeterogeneousPolicy(WIDTH, 4, 32, 8)

    def logprob(self, latent_SNK: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, shape (S, N, actions)."""
        flat = latent_SNK.flatten(0, 1)
        hidden = self.networks.layer(self.hidden.expand(len(flat), -1), flat)
        return self.head(hidden).log_softmax(-1).view(*latent_SNK.shape[:2], -1)

    def latents(self, seen_SND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.networks.encoder.along_chains(seen_SND, (-1,) * len(seen_SND))

    def expected(self, seen_SND: torch.Tensor, kind_S: torch.Tensor, draws: int) -> torch.Tensor:
        """Return the mean payoff, exact except for the draws of ε."""
        mu, sigma = (part.repeat(draws, 1, 1) for part in self.latents(seen_SND))
        chance = self.logprob(mu + sigma * torch.randn_like(mu)).exp()
        payoff = PAYOFF_KAA[kind_S.repeat(draws)]
        return torch.einsum("sa,sab,sb->s", chance[:, 0], payoff, chance[:, 1]).mean()


def tasks(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the observations, (S, 2, WIDTH): names, game, and task noise; and the games."""
    kind_S = torch.randint(2, (count,))
    noise_SD = 0.5 * torch.randn(count, WIDTH - 4)
    game_SD = torch.cat([nn.functional.one_hot(kind_S, 2).float(), noise_SD], -1)
    name_SND = torch.eye(2).expand(count, -1, -1)
    return torch.cat([name_SND, game_SD[:, None].expand(-1, 2, -1)], -1), kind_S


def gradient(value: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the full gradient as one vector."""
    parts = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten()
            for g, p in zip(parts, parameters, strict=True)
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's tasks, what was drawn for them and its rewards."""

    seen_SND: torch.Tensor
    kind_S: torch.Tensor
    mu_SNK: torch.Tensor
    sigma_SNK: torch.Tensor
    epsilon_SNK: torch.Tensor
    drawn_SNK: torch.Tensor  # μ + σ ε
    old_SNA: torch.Tensor  # log π
    actions_SNG: torch.Tensor
    paid_SG: torch.Tensor
    gain_SG: torch.Tensor  # standardized advantage


@torch.no_grad()
def sampled(players: Players, critic: TeamCritic) -> Batch:
    seen, kind = tasks(TASKS)
    mu, sigma = players.latents(seen)
    epsilon = torch.randn_like(mu)
    drawn = mu + sigma * epsilon
    old = players.logprob(drawn)
    actions = torch.multinomial(old.exp().flatten(0, 1), SAMPLES, True).view(TASKS, 2, SAMPLES)
    paid = PAYOFF_KAA[kind[:, None], actions[:, 0], actions[:, 1]]
    gain = standardized((paid - critic(seen)[:, None]).flatten()).view_as(paid)
    return Batch(
        seen_SND=seen,
        kind_S=kind,
        mu_SNK=mu,
        sigma_SNK=sigma,
        epsilon_SNK=epsilon,
        drawn_SNK=drawn,
        old_SNA=old,
        actions_SNG=actions,
        paid_SG=paid,
        gain_SG=gain,
    )


def objective(reads: str, players: Players, inference: InferenceNet, batch: Batch) -> torch.Tensor:
    """Return the encoder's objective: V_I of what it ``reads``, or the drawn latents' surrogate."""
    mu, sigma = players.latents(batch.seen_SND)
    if reads:
        latent = mu + sigma * batch.epsilon_SNK if reads == "drawn" else mu
        with frozen(inference):
            return inference(batch.seen_SND, latent, sigma).mean()
    now = latent_logprob(batch.drawn_SNK, mu, sigma)[..., None]
    old = latent_logprob(batch.drawn_SNK, batch.mu_SNK, batch.sigma_SNK)[..., None]
    return -clipped_policy(now, old, batch.gain_SG[:, None], CLIP).mean()


def learn(way: tuple[str, int] | None, seed: int, steps: int) -> tuple[float, float]:
    """Return the mean cosine to the true gradient, and the final expected payoff."""
    torch.manual_seed(seed)
    players, inference, critic = Players(), InferenceNet(WIDTH, 32, 4), TeamCritic(WIDTH)
    encoder = list(players.networks.encoder.parameters())
    actor = [players.hidden, *players.head.parameters(), *players.networks.layer.parameters()]
    optimizers = {
        "actor": torch.optim.Adam(actor, lr=3e-2),
        "critic": torch.optim.Adam(critic.parameters(), lr=1e-2),
        "encoder": torch.optim.Adam(encoder, lr=3e-3),
        "inference": torch.optim.Adam(inference.parameters(), lr=1e-2),
    }

    def descend(name: str, loss: torch.Tensor) -> None:
        optimizers[name].zero_grad()
        loss.backward()
        optimizers[name].step()

    past: deque[tuple[torch.Tensor, ...]] = deque(maxlen=1 + (way[1] if way else 0))
    cosines = []
    for step in range(steps):
        batch = sampled(players, critic)
        read = batch.drawn_SNK if way and way[0] == "drawn" else batch.mu_SNK
        past.append((batch.seen_SND, read, batch.sigma_SNK, batch.paid_SG.mean(1)))
        old = batch.old_SNA.gather(2, batch.actions_SNG)
        for epoch in range(EPOCHS):
            logprob_SNG = players.logprob(batch.drawn_SNK).gather(2, batch.actions_SNG)
            descend("actor", clipped_policy(logprob_SNG, old, batch.gain_SG[:, None], CLIP).mean())
            value = critic(batch.seen_SND)[:, None]
            descend("critic", ((value - batch.paid_SG) ** 2).mean())
            if way is None:
                continue
            climbed = objective(way[0], players, inference, batch)
            if epoch == 0 and step % 10 == 0:
                truth = gradient(players.expected(batch.seen_SND, batch.kind_S, 64), encoder)
                estimate = gradient(climbed, encoder)
                cosines.append(float(torch.cosine_similarity(estimate, truth, dim=0)))
            descend("encoder", -climbed)
            if way[0]:
                *read_of_all, paid_P = (torch.cat(parts) for parts in zip(*past, strict=True))
                descend("inference", ((inference(*read_of_all) - paid_P) ** 2).mean())
    with torch.no_grad():
        end = float(players.expected(*tasks(256), 16))
    return statistics.fmean(cosines or [0.0]), end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: a standard error needs two or more")
    body = []
    for name, way in WAYS.items():
        runs = [learn(way, seed, options.steps) for seed in range(options.seeds)]
        cells = [
            f"{statistics.fmean(part):.2f} ± {statistics.stdev(part) / len(part) ** 0.5:.2f}"
            for part in zip(*runs, strict=True)
        ]
        body.append([name, *cells] if way else [name, "", cells[1]])
        print(body[-1], file=sys.stderr, flush=True)
    print(table(["what teaches the encoder", "cosine to the true gradient", "payoff"], body))


if __name__ == "__main__":
    main()
