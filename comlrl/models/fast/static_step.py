"""A decoding step with the same operations, shapes and addresses every time.

All tensors that a step reads or writes, including the step's number, are allocated once for each
bucket of batch sizes. A GPU can therefore replay the step as a CUDA graph (``graphs.py``), within
which the host waits for nothing. Rows fill a grid of prompts × siblings; rows without a request are
unused. Attention covers the bucket's lengths, with a mask.

A layer is a function of tensors alone, shared by all layers. It launches 42 kernels on a CPU; a GPU
fuses the 12 of the norms into two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast import compiled_update
from comlrl.models.fast.attention import wide
from comlrl.models.fast.autograd_functions import swiglu
from comlrl.models.fast.decoder import FastDecoder, Layer
from comlrl.models.fast.extended import Extended, extended_linear

# Buckets depend on the batch alone, not on free memory, so that a resumed run uses the same ones.
ROW_BUCKETS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LENGTH_STEP = 128  # tokens of prompts
TOKEN_BUCKETS = (64, 128, 256, 512, 1024)


def bucket(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds ``count``; beyond the last, a multiple of it."""
    fitting = (size for size in buckets if size >= count)
    return next(fitting, -(-count // buckets[-1]) * buckets[-1])


def grid_of(prompts: int, siblings: int) -> int:
    """Return the number of prompts, at least ``prompts``, whose siblings best fill a bucket."""
    return max(prompts, bucket(prompts * siblings, ROW_BUCKETS) // siblings)


class LayerWeights(NamedTuple):
    """The weights of a layer."""

    input_norm: Tensor
    qkv: Extended
    head_norms: Tensor | None  # (heads + kv heads, width)
    out: Extended
    post_attention_norm: Tensor
    gate_up: Extended
    down: Extended


class LayerCache(NamedTuple):
    """The keys and values of a layer: of P prompts, and of their G siblings' tokens."""

    prefix_key: Tensor  # (P, kv, width, L)
    prefix_value: Tensor  # (P, kv, L, width)
    suffix: Tensor  # keys and values of the siblings' tokens, (2, P, kv, G, T, width)


class StepTensors(NamedTuple):
    """Tensors that all layers of a step read."""

    t: Tensor  # (1,)
    cos: Tensor  # (R, 1, width)
    sin: Tensor
    prefix_bias: Tensor  # (P · kv, 1, L)
    suffix_bias: Tensor  # (1, 1, reach)
    owner_RN: Tensor


class Scalars(NamedTuple):
    """The constants of a model's layers."""

    heads: int
    scaling: float
    eps: float


def layer_step(
    x: Tensor, weights: LayerWeights, cache: LayerCache, step: StepTensors, scalars: Scalars
) -> Tensor:
    """Apply a layer to one token of each row, (R, D), and cache its keys and values."""
    heads, scaling, eps = scalars
    _, prompts, kv, siblings, _, width = cache.suffix.shape
    rows, group, reach = prompts * siblings, heads // kv, step.suffix_bias.shape[-1]
    y = F.rms_norm(x, (x.shape[1],), weights.input_norm, eps)
    y = extended_linear(y, weights.qkv, step.owner_RN).view(rows, -1, width)
    turned = y[:, : heads + kv]
    if weights.head_norms is not None:
        turned.copy_(F.rms_norm(turned, (width,), None, eps) * weights.head_norms)
    rolled = turned.roll(width // 2, -1)
    turned.mul_(step.cos).addcmul_(rolled, step.sin)
    # In the order (P, kv, G), each key head of a prompt is one matrix product.
    grid = wide(y).view(prompts, siblings, -1, width)
    added = grid[:, :, heads:].unflatten(2, (2, kv)).permute(2, 0, 3, 1, 4)
    cache.suffix.index_copy_(4, step.t, added[:, :, :, :, None])
    keys, values = cache.suffix[..., :reach, :].flatten(1, 3)
    query = grid[:, :, :heads].unflatten(2, (kv, group)).transpose(1, 2)
    query = query.reshape(prompts * kv, siblings * group, width)
    to_prefix = torch.baddbmm(
        step.prefix_bias, query, cache.prefix_key.flatten(0, 1), alpha=scaling
    )
    query = query.view(-1, group, width)
    to_suffix = torch.baddbmm(step.suffix_bias, query, keys.transpose(1, 2), alpha=scaling)
    scores = torch.cat([to_prefix.view(len(query), group, -1), to_suffix], -1)
    attention = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    length = to_prefix.shape[-1]
    of_prefix = attention.view(len(to_prefix), siblings * group, -1)[..., :length]
    out = torch.bmm(of_prefix, cache.prefix_value.flatten(0, 1)).view(query.shape)
    out.baddbmm_(attention[..., length:], values)
    out = out.view(prompts, kv, siblings, group * width).transpose(1, 2).reshape(rows, -1)
    x = extended_linear(out.to(x.dtype), weights.out, step.owner_RN, x)
    y = F.rms_norm(x, (x.shape[1],), weights.post_attention_norm, eps)
    y = swiglu(extended_linear(y, weights.gate_up, step.owner_RN))
    return extended_linear(y, weights.down, step.owner_RN, x)


class StaticBatch:
    """The state of R = P · G rows that decode up to T tokens after prompts of up to L."""

    def __init__(
        self,
        fast: FastDecoder,
        prompts: int,
        siblings: int,
        length: int,
        tokens: int,
        compiled: bool = False,
    ) -> None:
        """Allocate a batch. ``compiled``: whether its layers are compiled."""
        self.layer = compiled_update.compiled(layer_step) if compiled else layer_step
        self.fast, self.siblings, self.capacity = fast, siblings, tokens
        weight = fast.embedding.weight
        self.device, rows = weight.device, prompts * siblings
        self.slots = prompts * (length + siblings * tokens)  # of keys and values in a layer
        kv, width = fast.kv_heads, fast.width
        dtype = wide(torch.empty(0, dtype=weight.dtype, device=self.device)).dtype

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.caches = [
            LayerCache(
                new(prompts, kv, width, length),
                new(prompts, kv, length, width),
                new(2, prompts, kv, siblings, tokens, width),
            )
            for _ in fast.layers
        ]
        self.weights = [self._weights(layer) for layer in fast.layers]
        self.scalars = Scalars(fast.heads, fast.scaling, fast.norm.variance_epsilon)
        self.bias_PL = new(prompts, length)
        self.prefix_bias = new(prompts * kv, 1, length)
        self.length_R = new(rows, dtype=torch.long)
        self.t = new(1, dtype=torch.long)  # the step
        self.at_T = torch.arange(tokens, device=self.device)
        self.token_R = new(rows, dtype=torch.long)  # each row's newest
        self.hidden_RD = new(rows, weight.shape[1], dtype=weight.dtype)
        self.previous_RD = torch.zeros_like(self.hidden_RD)  # before the newest step
        self.cos, self.sin = fast.rotations(torch.arange(length + tokens, device=self.device))
        self.owner_RN = new(rows, len(fast.names), dtype=weight.dtype)

    def _weights(self, layer: Layer) -> LayerWeights:
        extended, norms = self.fast.extended.of_product, layer.head_norms
        return LayerWeights(
            layer.input_norm.weight,
            extended[layer.qkv],
            None if norms is None else norms.weight,
            extended[layer.out],
            layer.post_attention_norm.weight,
            extended[layer.gate_up],
            extended[layer.down],
        )

    def begin(
        self,
        prefix: Sequence[tuple[Tensor, Tensor]],
        lengths_P: Tensor,
        hidden_PD: Tensor,
        agent_P: Tensor,
    ) -> None:
        """Start with these prompts, which may be fewer than P.

        ``prefix``: each layer's keys (P, kv heads, width, L) and values (P, kv heads, L, width).
        ``hidden_PD``: states of the prompts' last tokens. ``agent_P``: indices into ``fast.names``.
        """
        count, length = len(lengths_P), prefix[0][0].shape[-1]
        for cache, (key, value) in zip(self.caches, prefix, strict=True):
            # Entries outside have weight 0, but 0 · NaN from an earlier batch would be NaN.
            cache.prefix_key.zero_()[:count, :, :, :length] = key
            cache.prefix_value.zero_()[:count, :, :length] = value
            cache.suffix.zero_()
        lengths = F.pad(lengths_P, (0, len(self.bias_PL) - count))
        columns = torch.arange(self.bias_PL.shape[1], device=self.device)
        self.bias_PL.zero_().masked_fill_(columns >= lengths[:, None], -torch.inf)
        self.prefix_bias[:, 0] = self.bias_PL.repeat_interleave(self.fast.kv_heads, 0)
        self.length_R.copy_(lengths.repeat_interleave(self.siblings))
        self.hidden_RD.zero_()
        self.hidden_RD[: count * self.siblings] = hidden_PD.repeat_interleave(self.siblings, 0)
        agent_R = F.pad(agent_P, (0, len(lengths) - count)).repeat_interleave(self.siblings)
        adapters = torch.arange(self.owner_RN.shape[1], device=self.device)
        self.owner_RN.copy_(agent_R[:, None] == adapters)
        self.t.zero_()
        self.fast.extended.refresh()
        for weights, layer in zip(self.weights, self.fast.layers, strict=True):
            if weights.head_norms is not None and layer.head_norms is not None:
                weights.head_norms.copy_(layer.head_norms.weight)

    def step(self, reach: int) -> None:
        """Run the model on the newest token of each row.

        ``reach``: tokens per row that attention covers; must exceed the step's number.
        """
        self.previous_RD.copy_(self.hidden_RD)
        position_R = self.length_R + self.t
        suffix_bias = torch.zeros(1, 1, reach, dtype=self.bias_PL.dtype, device=self.device)
        suffix_bias.masked_fill_(self.at_T[:reach] > self.t, -torch.inf)
        step = StepTensors(
            self.t,
            self.cos.index_select(0, position_R),
            self.sin.index_select(0, position_R),
            self.prefix_bias,
            suffix_bias,
            self.owner_RN,
        )
        x = self.fast.embedding(self.token_R)
        for weights, cache in zip(self.weights, self.caches, strict=True):
            x = self.layer(x, weights, cache, step, self.scalars)
        norm = self.fast.norm
        self.hidden_RD.copy_(F.rms_norm(x, norm.weight.shape, norm.weight, self.scalars.eps))
        self.t.add_(1)

    def undo(self) -> None:
        """Undo the latest step, so that it can be repeated with other tokens."""
        self.t.sub_(1)
        self.hidden_RD.copy_(self.previous_RD)
