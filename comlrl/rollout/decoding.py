"""Forward passes of a decoding batch, by transformers' modules or the fast decoder.

Both store a prompt once for all rows that continue it (``models/fast/prefix_cache.py``), and route
each agent's rows through its adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from comlrl.models.agent import Agent
from comlrl.models.fast import prefix_cache
from comlrl.models.fast.attention import wide
from comlrl.models.fast.decoder import FastDecoder, Routes
from comlrl.models.fast.packed_attention import Packed, rounded
from comlrl.models.rows import pack
from comlrl.types import Row

ROWS_STEP = 16  # rows are padded to a multiple of it: a new shape may cost more than extra rows


class ByModules:
    """Decoding by transformers' modules, whose attention ``prefix_cache.used_by`` has replaced.

    Rows of one agent are adjacent, as are those of a prompt; likewise in ``ByFastDecoder``.
    """

    def __init__(
        self, agent: Agent, cache: prefix_cache.SharedPrefixCache, adapters: Sequence[str]
    ) -> None:
        self.agent, self.cache, self.adapters = agent, cache, adapters
        self.inputs = {"past_key_values": cache, "shared_prefix": cache, "use_cache": True}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the last hidden state of each prompt, (P, D)."""
        device = self.agent.device
        longest = max(map(len, prompts))
        pad = self.agent.tokenizer.pad_token_id
        ids_PL = torch.tensor([[*p, *[pad] * (longest - len(p))] for p in prompts], device=device)
        positions = torch.arange(longest, device=device)[None]
        self._route(torch.arange(len(prompts)))
        hidden = self.agent.hidden(input_ids=ids_PL, position_ids=positions, **self.inputs)
        return hidden[torch.arange(len(prompts), device=device), self.cache.lengths_P - 1]

    def _route(self, prompt_of_R: Tensor) -> None:
        if self.agent.router is not None:
            self.agent.router.routes = routes(self.adapters, prompt_of_R)

    def begin(self, prompt_of_R: Tensor) -> None:
        """Begin decoding after prefill; row r continues prompt ``prompt_of_R[r]``."""
        self.cache.begin(prompt_of_R)
        self._route(prompt_of_R)

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only."""
        self.cache.keep(rows)
        self._route(self.cache.prompt_of_R)

    def step(self, tokens_R: Tensor) -> Tensor:
        """Return hidden states of each row's newest token, (R, D)."""
        inputs = {"input_ids": tokens_R[:, None], "position_ids": self.cache.positions_R[:, None]}
        return self.agent.hidden(**inputs, **self.inputs)[:, -1]


class ByFastDecoder:
    """Decoding by ``FastDecoder``: prompts without padding, few operations per step."""

    def __init__(
        self,
        fast: FastDecoder,
        cache: prefix_cache.SharedPrefixCache,
        adapters: Sequence[str | None],
    ) -> None:
        self.fast, self.cache, self.adapters = fast, cache, adapters
        longest = int(cache.lengths_P.max())
        positions = torch.arange(longest + cache.max_new_tokens, device=cache.lengths_P.device)
        self.cos, self.sin = fast.rotations(positions)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        lengths_P = self.cache.lengths_P
        rows = [Row(tuple(prompt), (), (), ()) for prompt in prompts]
        agent_P = torch.tensor([self.adapters.index(adapter) for adapter in self.adapters])
        batch = Packed(pack(rows, 0), lengths_P.device, self.fast.step, agent_R=agent_P)
        prompt_of_P = torch.arange(len(prompts), device=lengths_P.device)
        tokens_P = batch.tokens_P.to(lengths_P.device)
        prompt_of_T = filled(prompt_of_P.repeat_interleave(tokens_P), len(batch.ids_T))
        last_W = rows_filled(batch.ends_P).to(lengths_P.device)
        last_routes = routes(self.adapters, filled(prompt_of_P, len(last_W)))
        last = batch.read(batch.ends_P, len(last_W))
        hidden_WD = self.fast.hidden(
            batch.ids_T,
            (self.cos[batch.positions_T], self.sin[batch.positions_T]),
            self.fast.attention(batch, last, self.cache.update),
            routes(self.adapters, prompt_of_T),
            last_W,
            last_routes,
        )
        return hidden_WD[: len(prompts)]

    def begin(self, prompt_of_R: Tensor) -> None:
        self.cache.begin(prompt_of_R)
        self.routes = routes(self.adapters, prompt_of_R)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.routes = routes(self.adapters, self.cache.prompt_of_R)

    def step(self, tokens_R: Tensor) -> Tensor:
        positions_R = self.cache.positions_R
        rotations = self.cos[positions_R], self.sin[positions_R]
        return self.fast.hidden(tokens_R, rotations, self._attend_step, self.routes)

    def _attend_step(self, layer: int, qkv_RHW: Tensor) -> Tensor:
        heads, kv = self.fast.heads, self.fast.kv_heads
        rows, _, width = qkv_RHW.shape
        query, key, value = wide(qkv_RHW)[:, :, None].split((heads, kv, kv), 1)
        key, value = self.cache.update(key, value, layer)
        query = query.reshape(rows, kv, heads // kv, width)
        out = prefix_cache.step_attention(self.cache, layer, query, key, value, self.fast.scaling)
        return out.reshape(rows, heads * width).to(qkv_RHW.dtype)


def rows_filled(index: Tensor) -> Tensor:
    """Pad to a multiple of ``ROWS_STEP`` by repeating the last element."""
    return filled(index, rounded(len(index), ROWS_STEP))


def filled(index: Tensor, count: int) -> Tensor:
    """Pad to ``count`` by repeating the last element."""
    return torch.cat([index, index[-1:].expand(count - len(index))])


def routes(adapters: Sequence[str | None], prompt_of_row: Tensor) -> Routes:
    """Return blocks of rows with the same adapter; ``adapters``: one per prompt."""
    counts = torch.bincount(prompt_of_row, minlength=len(adapters)).tolist()
    blocks: list[tuple[str | None, slice]] = []
    end = 0
    for adapter, group in itertools.groupby(range(len(adapters)), key=lambda p: adapters[p]):
        start, end = end, end + sum(counts[p] for p in group)
        if end > start:
            blocks.append((adapter, slice(start, end)))
    return blocks
