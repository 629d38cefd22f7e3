"""A key/value cache in which all completions of a prompt share the prompt's part.

Decoding R rows over P prompts stores P prompts instead of R, and a step's attention to a prompt is
one matrix product for all its siblings. The result equals ordinary attention over the concatenation
of prompt and completion, up to the order of summation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

NAME = "comlrl_shared_prefix"


class SharedPrefixCache:
    """Keys and values of P right-padded prompts and of the tokens of R rows, for each layer.

    Usage: prefill once (``update`` stores prompts) and call ``begin(prompt_of_R)``; then, at each
    decoding step, ``update`` with one token per row and add 1 to ``step``. ``keep`` drops rows.
    """

    def __init__(self, lengths_P: torch.Tensor, max_new_tokens: int) -> None:
        self.lengths_P, self.max_new_tokens = lengths_P, max_new_tokens
        self.prefilling = True
        self.prompt_of_R = torch.arange(len(lengths_P), device=lengths_P.device)
        self.step = 0
        # In the layout of the products: keys (P, heads, width, L), values (P, heads, L, width).
        self.prefix: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.suffix: list[tuple[torch.Tensor, torch.Tensor]] = []  # (R, heads, T, width)
        longest = int(lengths_P.max())
        columns = torch.arange(longest, device=lengths_P.device)
        self.padding_PL = columns[None, :] >= lengths_P[:, None]

    @property
    def positions_R(self) -> torch.Tensor:
        """Positions of each row's newest token."""
        return self.lengths_P[self.prompt_of_R] + self.step

    def begin(self, prompt_of_R: torch.Tensor) -> None:
        """Begin decoding; row r continues prompt ``prompt_of_R[r]`` (rows in prompt order)."""
        self.prefilling = False
        self._place(prompt_of_R)

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with these rows only."""
        self.suffix = [(self._select(k, rows), self._select(v, rows)) for k, v in self.suffix]
        self._place(self.prompt_of_R[rows])

    def _select(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        selected = tensor.new_empty(len(rows), *tensor.shape[1:])
        torch.index_select(tensor[:, :, : self.step], 0, rows, out=selected[:, :, : self.step])
        return selected

    def _place(self, prompt_of_R: torch.Tensor) -> None:
        """Assign each row a slot in a (prompts, siblings) grid; drop prompts without rows."""
        prompts, group, counts = torch.unique_consecutive(
            prompt_of_R, return_inverse=True, return_counts=True
        )
        if len(self.padding_PL) != len(prompts):
            index = torch.searchsorted(torch.unique_consecutive(self.prompt_of_R), prompts)
            self.prefix = [(k[index], v[index]) for k, v in self.prefix]
            self.padding_PL = self.padding_PL[index]
        self.bias_PL: torch.Tensor | None = None
        self.prompt_of_R = prompt_of_R
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(prompt_of_R), device=prompt_of_R.device) - first[group]
        self.siblings = int(counts.max())
        self.slot_R = group * self.siblings + rank
        self.full_grid = len(prompt_of_R) == len(prompts) * self.siblings

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values.

        Returns them for the prefill; afterwards, those of all the rows' tokens so far.
        """
        if self.prefilling:
            self.prefix.append((key.transpose(-1, -2).contiguous(), value.contiguous()))
            return key, value
        if len(self.suffix) <= layer:
            shape = (*key.shape[:2], self.max_new_tokens, key.shape[-1])
            self.suffix.append((key.new_empty(shape), value.new_empty(shape)))
        keys, values = self.suffix[layer]
        keys[:, :, self.step] = key[:, :, 0]
        values[:, :, self.step] = value[:, :, 0]
        return keys[:, :, : self.step + 1], values[:, :, : self.step + 1]

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias added to scores of prompts, (P, L): −∞ in padding."""
        if self.bias_PL is None:
            zeros = torch.zeros(self.padding_PL.shape, dtype=dtype, device=self.padding_PL.device)
            self.bias_PL = zeros.masked_fill_(self.padding_PL, -torch.inf)
        return self.bias_PL

    def get_seq_length(self, *_: Any) -> int:
        return 0 if self.prefilling else self.padding_PL.shape[1] + self.step

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape (R, heads, n, x) rows → (P, heads, siblings · n, x) grid."""
        _, heads, count, width = rows.shape
        prompts = len(self.padding_PL)
        if not self.full_grid:
            grid = rows.new_zeros(prompts * self.siblings, heads, count, width)
            rows = grid.index_copy_(0, self.slot_R, rows)
        rows = rows.view(prompts, self.siblings, heads, count, width).transpose(1, 2)
        return rows.reshape(prompts, heads, self.siblings * count, width)

    def gather(self, grid: torch.Tensor, count: int) -> torch.Tensor:
        """Invert ``spread``."""
        prompts, heads, _, width = grid.shape
        grid = grid.view(prompts, heads, self.siblings, count, width).transpose(1, 2)
        rows = grid.reshape(prompts * self.siblings, heads, count, width)
        return rows if self.full_grid else rows.index_select(0, self.slot_R)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    shared_prefix: SharedPrefixCache,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of the prefill (causal) or of a decoding step (prompt and own tokens)."""
    cache = shared_prefix
    if cache.prefilling:  # right padding lies after every real token: causal masking hides it
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None
    rows, heads, _, width = query.shape
    groups = key.shape[1]  # key/value heads
    query = query.reshape(rows, groups, heads // groups, width)
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = step_attention(cache, layer, query, key, value, scaling)
    return out.reshape(rows, 1, heads, width), None


def step_attention(
    cache: SharedPrefixCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend from one new token per row to its prompt and its own tokens.

    ``query`` and the result are (R, kv heads, query heads of each, width); ``key`` and ``value`` of
    the rows' tokens are (R, kv heads, T, width).
    """
    count = query.shape[2]
    query = query * scaling
    prefix_key, prefix_value = cache.prefix[layer]
    to_prefix = cache.spread(query) @ prefix_key
    to_prefix += cache.bias(to_prefix.dtype)[:, None, None, :]
    to_own = query @ key.transpose(-1, -2)
    scores = torch.cat([cache.gather(to_prefix, count), to_own], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    longest = prefix_value.shape[2]
    out = weights[..., longest:] @ value
    return out + cache.gather(cache.spread(weights[..., :longest]) @ prefix_value, count)


AttentionInterface.register(NAME, attention)


def full_attention(config: Any) -> bool:
    """Return whether every layer sees all previous tokens: no window, no chunks."""
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None  # as in Mistral's config


def supported(model: PreTrainedModel) -> bool:
    """Return whether this model's attention can be replaced: full, and dispatched by name."""
    config = model.config
    return (
        full_attention(config)
        and bool(getattr(model, "_supports_attention_backend", False))
        and config._attn_implementation in ("sdpa", "eager")
        and getattr(config, "attn_logit_softcapping", None) is None
    )


@contextlib.contextmanager
def used_by(model: PreTrainedModel) -> Iterator[bool]:
    """Use this attention in the model if supported; yield whether it is."""
    if not supported(model):
        yield False
        return
    implementation = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield True
    finally:
        model.config._attn_implementation = implementation
