"""Sampling of tokens from hidden states, with uniform random numbers for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from comlrl.keyed import uniforms
from comlrl.models.agent import Agent
from comlrl.rollout.stops import StopTexts, stop_texts
from comlrl.rollout.truncation import Survivors, truncated
from comlrl.types import Request, Sampling

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (hidden, latents) → hidden


def _completing(agent: Agent, stops: Sequence[StopTexts | None]) -> torch.Tensor | None:
    """Return the mask of tokens that may complete a stop, (sampling settings, V), or None."""
    if not any(stops):
        return None
    table = torch.zeros(len(stops), agent.vocabulary, dtype=torch.bool)
    for number, texts in enumerate(stops):
        if texts is not None:
            table[number, [i for i in texts.completing if i < table.shape[1]]] = True
    return table.to(agent.device)


class Draw:
    """Sampler of a batch's tokens from hidden states, with uniform random numbers for each row."""

    def __init__(
        self,
        agent: Agent,
        requests: Sequence[Request],
        sampling_of_request: Sequence[Sampling],
        head: Head | None,
        request_of_row: torch.Tensor,
        on_written: Callable[[float], None],
    ) -> None:
        self.agent, self.head = agent, head
        self.on_written, self.written = on_written, 0.0  # completions
        self.ways = list(dict.fromkeys(sampling_of_request))  # distinct settings of agents
        self.steps = max(way.max_new_tokens for way in self.ways)
        number = [self.ways.index(way) for way in sampling_of_request]
        self.way = torch.tensor(number, device=agent.device)[request_of_row]  # of each row
        limit = torch.tensor([way.max_new_tokens for way in self.ways], device=agent.device)
        self.limit = limit[self.way]
        stop_ids = [i for i in agent.stop_ids if i < agent.vocabulary]
        self.stop_V = torch.zeros(agent.vocabulary, dtype=torch.bool)
        self.stop_V[stop_ids] = True
        self.stop_V = self.stop_V.to(agent.device)
        self.stops = [stop_texts(agent.tokenizer, w.stop) if w.stop else None for w in self.ways]
        self.completing = _completing(agent, self.stops)
        if head is not None:
            latents = torch.stack([r.latent_K for r in requests])  # type: ignore[misc]
            self.latents = latents.to(agent.device)[request_of_row]
        self.broken = torch.zeros((), dtype=torch.bool, device=agent.device)
        shape = (len(request_of_row), self.steps)
        self.logprobs = torch.full(shape, torch.nan, device=agent.device)
        if any(way.temperature > 0 for way in self.ways):
            streams = [uniforms(key, self.steps) for r in requests for key in r.keys_G]
            self.uniforms = torch.from_numpy(np.stack(streams)).float().to(agent.device)
        self.survivors: Survivors | None = None
        support = [
            way.max_support for way in self.ways if way.truncates and way.max_support is not None
        ]
        if support:
            self.survivors = Survivors(*shape, support[0], agent.device)

    def __call__(self, hidden: torch.Tensor, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the next token of each row, from its last hidden state (rows, width)."""
        self.note_written(len(rows))
        if self.head is not None:
            hidden = self.head(hidden, self.latents[rows])
        return self.tokens(hidden, rows, step)

    def note_written(self, rows: int) -> None:
        """Report a new token in each of this many rows."""
        self.written += (more := rows / self.steps)
        self.on_written(more)

    def tokens(self, hidden: torch.Tensor, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Sample tokens as a call does, but without ``head`` and without reporting them."""
        logits = self.agent.logits(hidden).float()
        if len(self.ways) == 1:
            return self.drawn(logits, rows, step, self.ways[0])
        tokens = torch.empty_like(rows)
        for number, way in enumerate(self.ways):
            group = (self.way[rows] == number).nonzero()[:, 0]
            if len(group):
                tokens[group] = self.drawn(logits[group], rows[group], step, way)
        return tokens

    def ended(self, tokens: torch.Tensor, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the mask of the rows that end here; ``tokens``: of all rows, −1 after an end."""
        last = tokens[rows, step]
        stopped = (last >= 0) & self.stop_V[last.clamp(min=0)]
        if self.completing is not None:
            # On the host, for the few rows whose newest token may complete a stop.
            may = (last >= 0) & ~stopped & self.completing[self.way[rows], last.clamp(min=0)]
            for place in may.nonzero()[:, 0].tolist():
                row = rows[place]
                stops = self.stops[int(self.way[row])]
                assert stops is not None
                stopped[place] = stops.completed_by(tokens[row, : step + 1].tolist())
        if len(self.ways) == 1:  # the last step is the same for all
            return stopped
        return stopped | (self.limit[rows] == step + 1)

    def drawn(
        self, logits: torch.Tensor, rows: torch.Tensor, step: int, sampling: Sampling
    ) -> torch.Tensor:
        if sampling.temperature == 0:
            best = logits.max(-1)
            self.broken |= ~best.values.isfinite().all()
            return best.indices
        if sampling.temperature != 1:
            logits = logits / sampling.temperature
        probabilities = torch.softmax(logits, dim=-1)
        self.broken |= ~probabilities[:, 0].isfinite().all()  # one that is NaN makes all NaN
        if sampling.truncates:
            untruncated, probabilities = probabilities, truncated(probabilities, sampling)
            if self.survivors is not None:
                self.survivors.note(untruncated, probabilities, rows, step)
        token, drawn = inverse_cdf(probabilities, self.uniforms[rows, step, None])
        self.logprobs.select(1, step).index_copy_(0, rows, drawn.log())
        return token[:, 0]


def inverse_cdf(
    weight_RK: torch.Tensor, uniform_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample indices, (R, 1), by inverse CDF of weights; also return their probabilities, (R,)."""
    cdf_RK = weight_RK.cumsum(-1)
    total_R1 = cdf_RK[:, -1:].contiguous()
    place_R1 = torch.searchsorted(cdf_RK, uniform_R1 * total_R1, right=True)
    # Rounding may put the threshold at the very end: take the first index that reaches the total.
    place_R1 = torch.minimum(place_R1, torch.searchsorted(cdf_RK, total_R1))
    place_R1 = place_R1.clamp(max=weight_RK.shape[-1] - 1)  # NaN has no index
    return place_R1, (weight_RK.gather(-1, place_R1) / total_R1)[:, 0]
