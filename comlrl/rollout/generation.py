"""Sampling of many (prompt, keys) requests in as few model calls as possible.

A prompt is prefilled once, and all rows that begin with it share its key/value cache. Rows with the
same tokens so far are computed once, and finished rows leave the batch
(``models/fast/prefix_cache.py``).

Sampling is keyed: each completion draws uniforms from a counter-based generator, whose key is a
hash of the completion's identity, and turns them into tokens by inverse CDF. Completions therefore
do not depend on how requests are batched or on what ran before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from transformers import DynamicCache

from comlrl.errors import NonFiniteError
from comlrl.models.agent import Agent
from comlrl.models.fast import prefix_cache
from comlrl.models.team import Team
from comlrl.rollout.decoding import ByFastDecoder, ByModules, routes, rows_filled
from comlrl.rollout.draw import Draw, Head
from comlrl.rollout.static_decoding import StaticDecoding
from comlrl.rollout.team_reader import TeamReader
from comlrl.types import Completion, Request, Sampling, SamplingSupport


class Generator(TeamReader):
    """Sampler of a team. ``head`` (SHPPO) changes hidden states before the language-model head."""

    def __init__(
        self,
        team: Team,
        max_batch_tokens: int = 262144,
        max_length: int = 2048,
        head: Head | None = None,
        *,
        decoding: Literal["auto", "growing", "static", "graphs", "compiled"] = "auto",
    ) -> None:
        super().__init__(team, max_length)
        self.max_batch_tokens, self.head = max_batch_tokens, head
        if decoding == "auto":
            on_gpus = all(agent.device.type == "cuda" for agent in team.agents)
            decoding = "graphs" if on_gpus else "growing"
        self.static: StaticDecoding | None = None
        if decoding != "growing" and head is None:
            self.static = StaticDecoding(
                max_batch_tokens, decoding in ("graphs", "compiled"), decoding == "compiled"
            )
        self.calls = 0  # generation calls so far, one for each chunk of requests
        self.tokens = 0  # sampled so far
        # Called with the progress in completions, of which each token is a fraction.
        self.on_written: Callable[[float], None] = lambda completions: None

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample completions of each agent's requests, in order: a tuple with one for each key.

        Agents that share a base decode in one batch; others sequentially. Raises NonFiniteError if
        logits are not finite.
        """
        if self.team.router is not None:
            return self._batch(range(len(requests_N)), requests_N, sampling)
        results = []
        for index, requests in enumerate(requests_N):
            with self.team.acting(index):
                results += self._batch([index], [requests], sampling)
        return results

    def _batch(
        self, agents: Sequence[int], requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample these agents' requests, all through one model."""
        flat = [
            (agent, request)
            for agent, requests in zip(agents, requests_N, strict=True)
            for request in requests
        ]
        if not flat:
            return [[] for _ in requests_N]
        model = self.team.actor(agents[0]).model
        results: dict[int, tuple[Completion, ...]] = {}
        chunks = list(self._chunks(flat, sampling))
        self.calls += len(chunks)
        # Static states are kept for later calls.
        without_gradients = torch.no_grad if self.static is not None else torch.inference_mode
        with prefix_cache.used_by(model) as shared, without_gradients(), _any_kernels():
            for chunk in chunks:
                chunk.sort(key=lambda i: flat[i][0])  # each agent's rows are adjacent
                completions = self._complete([flat[i] for i in chunk], sampling, shared)
                results.update(zip(chunk, completions, strict=True))
        self.tokens += sum(len(c.token_ids) for group in results.values() for c in group)
        ordered = iter(results[i] for i in range(len(flat)))
        return [[next(ordered) for _ in requests] for requests in requests_N]

    def _complete(
        self, owned: Sequence[tuple[int, Request]], sampling: Sampling, shared: bool
    ) -> list[tuple[Completion, ...]]:
        agent = self.team.actor(owned[0][0])
        requests = [request for _, request in owned]
        number = _prompts(owned)
        prompt_of_row = torch.tensor(
            [number[owner, request.prompt_ids] for owner, request in owned for _ in request.keys_G],
            device=agent.device,
        )
        request_of_row = torch.tensor(
            [i for i, request in enumerate(requests) for _ in request.keys_G], device=agent.device
        )
        each = [sampling.for_agent(owner) for owner, _ in owned]
        draw = Draw(agent, requests, each, self.head, request_of_row, self.on_written)
        prompts = [prompt_ids for _, prompt_ids in number]
        adapters = [self.team.actor(owner).adapter for owner, _ in number]
        lengths = torch.tensor([len(p) for p in prompts], device=agent.device)
        fast, router = agent.fast, agent.router
        cache = prefix_cache.SharedPrefixCache(lengths, draw.steps)
        phase = contextlib.nullcontext() if router is None else router.sampling()
        with fast.sampling() if fast is not None else phase:
            tokens = None
            if fast is not None and self.static is not None:
                tokens = self.static.decode(fast, adapters, prompts, prompt_of_row, draw)
            if tokens is not None:
                pass
            elif fast is not None:
                by: ByFastDecoder | ByModules = ByFastDecoder(fast, cache, adapters)
                tokens = _decode_shared(by, prompts, prompt_of_row, draw)
            elif shared:
                by = ByModules(agent, cache, adapters)
                tokens = _decode_shared(by, prompts, prompt_of_row, draw)
            else:
                if router is not None:
                    router.routes = routes(adapters, prompt_of_row)
                tokens = _decode_plain(agent, prompts, prompt_of_row, draw)
        if draw.broken:
            raise NonFiniteError("sampling met logits that are NaN or infinite", agent=agent.index)
        self.on_written(len(prompt_of_row) - draw.written)  # for rows that ended early
        rows = iter(_to_completions(agent, tokens, draw))
        return [tuple(next(rows) for _ in request.keys_G) for request in requests]

    def _chunks(
        self, owned: Sequence[tuple[int, Request]], sampling: Sampling
    ) -> Iterator[list[int]]:
        """Yield indices of requests of similar length, with those of one prompt adjacent.

        Each chunk has at most ``max_batch_tokens`` cache slots.
        """
        number = _prompts(owned)
        prompt = [(owner, request.prompt_ids) for owner, request in owned]
        chunk: list[int] = []
        prompts: set[tuple[int, tuple[int, ...]]] = set()
        rows = 0
        for i in sorted(range(len(owned)), key=lambda i: (len(prompt[i][1]), number[prompt[i]])):
            siblings, longest = len(owned[i][1].keys_G), len(prompt[i][1])
            distinct = len(prompts) + (prompt[i] not in prompts)
            slots = distinct * longest + (rows + siblings) * sampling.longest
            if chunk and slots > self.max_batch_tokens:
                yield chunk
                chunk, prompts, rows = [], set(), 0
            chunk.append(i)
            prompts.add(prompt[i])
            rows += siblings
        if chunk:
            yield chunk


@contextlib.contextmanager
def _any_kernels() -> Iterator[None]:
    """Turn torch's deterministic mode off.

    Sampling writes no index twice, so the mode would only add sorting of indices.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warning)


def _prompts(owned: Sequence[tuple[int, Request]]) -> dict[tuple[int, tuple[int, ...]], int]:
    """Return (agent, prompt) → number, for the distinct prompts of these requests."""
    distinct = dict.fromkeys((owner, request.prompt_ids) for owner, request in owned)
    return {prompt: number for number, prompt in enumerate(distinct)}


def _decode_shared(
    by: ByFastDecoder | ByModules,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: torch.Tensor,
    draw: Draw,
) -> torch.Tensor:
    """Return sampled tokens (rows, max_new_tokens), −1 after a row's end; the fast path.

    Rows of a prompt with the same tokens so far are one branch, which is computed once. Splitting
    or removing branches copies the cache, so ended branches stay while they are few.
    """
    device = prompt_of_row.device
    hidden_BD, branch_R = by.prefill(prompts), prompt_of_row
    rows = torch.arange(len(prompt_of_row), device=device)
    tokens = torch.full((len(rows), draw.steps), -1, device=device)
    for step in range(draw.steps):
        chosen_R = draw(hidden_BD[branch_R], rows, step)
        tokens.select(1, step).index_copy_(0, rows, chosen_R)
        going = ~draw.ended(tokens, rows, step)
        rows, branch_R, chosen_R = rows[going], branch_R[going], chosen_R[going]
        if len(rows) == 0 or step == draw.steps - 1:
            break
        # In order of the branches that they continue, so that prompts stay in order too.
        (parent_B, token_B), number_R = torch.stack([branch_R, chosen_R]).unique(
            dim=1, return_inverse=True
        )
        split = bool((parent_B[1:] == parent_B[:-1]).any())
        filled_B = rows_filled(parent_B)
        if step == 0 or split or len(filled_B) <= 0.85 * len(hidden_BD):
            by.begin(filled_B) if step == 0 else by.keep(filled_B)
            token_B, branch_R = rows_filled(token_B), number_R
        else:
            token_B = token_B.new_zeros(len(hidden_BD)).index_copy_(0, parent_B, token_B)
        hidden_BD = by.step(token_B)
        by.cache.step += 1
    return tokens


def _decode_plain(
    agent: Agent,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: torch.Tensor,
    draw: Draw,
) -> torch.Tensor:
    """Return sampled tokens with an ordinary cache and left padding, for any causal LM."""
    device = agent.device
    longest = max(map(len, prompts))
    pad = agent.tokenizer.pad_token_id
    padded = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    ids, mask = padded.to(device)[prompt_of_row], mask.to(device)[prompt_of_row]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=agent.model.config)
    rows = torch.arange(len(ids), device=device)
    going = torch.ones_like(rows, dtype=torch.bool)
    tokens = torch.full((len(rows), draw.steps), -1, device=device)
    for step in range(draw.steps):
        hidden = agent.hidden(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        chosen = draw(hidden[:, -1], rows, step)
        tokens.select(1, step).copy_(chosen.where(going, -1))
        going &= ~draw.ended(tokens, rows, step)
        if not going.any():
            break
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return tokens


def _to_completions(agent: Agent, tokens: torch.Tensor, draw: Draw) -> list[Completion]:
    """Return each row's completion; tokens (rows, max_new_tokens), −1 after a row's end."""
    stop = set(agent.stop_ids)
    ids = [tuple(t for t in row if t >= 0) for row in tokens.tolist()]
    texts = agent.tokenizer.batch_decode(ids, skip_special_tokens=True)
    finished = [bool(sampled) and sampled[-1] in stop for sampled in ids]
    for row, way in enumerate(draw.way.tolist() if draw.completing is not None else ()):
        stops = draw.stops[way]
        if stops is not None and stops.completed_by(ids[row]):
            texts[row], finished[row] = stops.text_before(ids[row]), True
    drawn = draw.logprobs.where(tokens >= 0, 0.0).sum(-1, dtype=torch.float64).tolist()
    left: Sequence[SamplingSupport | None] = [None] * len(ids)
    if draw.survivors is not None:
        cut = [draw.ways[way].truncates for way in draw.way.tolist()]
        support_R = draw.survivors.of_rows([len(sampled) for sampled in ids])
        left = [
            support if is_truncated else None
            for support, is_truncated in zip(support_R, cut, strict=True)
        ]
    logprobs = [
        () if math.isnan(total) else tuple(row[: len(sampled)])
        for total, row, sampled in zip(drawn, draw.logprobs.tolist(), ids, strict=True)
    ]
    return [
        Completion(text, sampled, done, total, logprob_L=logprob_L, support=support)
        for text, sampled, done, total, logprob_L, support in zip(
            texts, ids, finished, drawn, logprobs, left, strict=True
        )
    ]
