"""The forward pass of Llama-like decoders in few, large operations, with transformers' results.

Supports Qwen2, Qwen3 and Llama models with ordinary linear layers, with or without LoRA.
transformers runs about a hundred operations per layer, whose overhead dominates small models, and
decoding on any device. Here tokens are flat, (T, D), so that padding costs nothing. Layers with the
same input are one product. Norms, rotations and gates are single autograd nodes that save little
for the backward pass. The caller provides attention, because it knows which tokens see which.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from comlrl.models.fast import compiled_update
from comlrl.models.fast.autograd_functions import rms_norm, rotate, swiglu
from comlrl.models.fast.compiled_update import after_attention, before_attention, call
from comlrl.models.fast.extended import ExtendedWeights
from comlrl.models.fast.lora_routing import Router, is_quantized
from comlrl.models.fast.packed_attention import (
    AttentionPlan,
    Gather,
    Packed,
    gather,
    rounded,
    shape_step,
)
from comlrl.models.fast.prefix_cache import full_attention
from comlrl.models.fast.products import Product
from comlrl.models.fast.tree_mask import BLOCK, TreePlan
from comlrl.types import TokenBatch

# (layer, (T, heads + 2 kv, width)) → (T, heads · width). The last layer returns (W, …) if only W
# tokens are wanted.
Attend = Callable[[int, Tensor], Tensor]
Routes = Sequence[tuple[str | None, slice]]  # blocks of tokens and their adapters

FAMILIES = ("qwen2", "qwen3", "llama")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # others depend on the sequence length
# Limit on the merged weights of all agents while sampling. Larger weights are read from memory at
# every step, which for one merged copy per agent costs more than for the shared base.
MERGED_BYTES = 64 << 20


class HeadNorms:
    """The norm of query heads and the norm of key heads, applied as one (Qwen3)."""

    def __init__(self, attention: Any, heads: int, kv_heads: int) -> None:
        self.norms = ((attention.q_norm, heads), (attention.k_norm, kv_heads))

    @property
    def weight(self) -> Tensor:
        """Return the weights of each query and key head, (heads + kv_heads, width)."""
        return torch.cat([norm.weight.expand(count, -1) for norm, count in self.norms])

    def __call__(self, qkv: Tensor) -> Tensor:
        """Normalize queries and keys, not values, of (T, heads + 2 kv_heads, width)."""
        weight = self.weight
        normed, values = qkv[:, : len(weight)], qkv[:, len(weight) :]
        eps = self.norms[0][0].variance_epsilon
        return torch.cat([rms_norm(normed, weight, eps), values], 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """The products and norms of a decoder layer, in the order of a pass."""

    input_norm: Any
    qkv: Product
    head_norms: HeadNorms | None
    out: Product
    post_attention_norm: Any
    gate_up: Product
    down: Product


def _layer(layer: Any, heads: int, kv_heads: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return Layer(
        input_norm=layer.input_layernorm,
        qkv=Product([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norms=HeadNorms(attention, heads, kv_heads) if normed else None,
        out=Product([attention.o_proj]),
        post_attention_norm=layer.post_attention_layernorm,
        gate_up=Product([mlp.gate_proj, mlp.up_proj]),
        down=Product([mlp.down_proj]),
    )


class FastDecoder:
    """A model's decoder: token ids → last hidden states."""

    def __init__(
        self,
        model: PreTrainedModel,
        router: Router | None,
        adapters: Sequence[str],
        learning: bool,
    ) -> None:
        decoder: Any = model.get_decoder()
        config = model.config
        self.router, self.embedding, self.learning = router, decoder.embed_tokens, learning
        self.rotary, self.norm = decoder.rotary_emb, decoder.norm
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.layers = [_layer(layer, self.heads, self.kv_heads) for layer in decoder.layers]
        parts = [[each.qkv, each.out, each.gate_up, each.down] for each in self.layers]
        self.products = [*itertools.chain(*parts)]
        self.quantized = any(product.quantized for product in self.products)
        self.width, self.inner = decoder.layers[0].self_attn.head_dim, config.intermediate_size
        self.scaling = decoder.layers[0].self_attn.scaling
        weights: list[Any] = [
            getattr(layer, "base_layer", layer).weight for layer in _projections(model)
        ]
        self.bytes = sum(w.nbytes for w in weights)
        self.tree = False  # whether updates use one attention mask instead of grids
        self.compiled = False  # whether the layers of updates are compiled
        self.checkpointing = False  # whether updates recompute layers in the backward pass
        self.names = tuple(adapters)
        exact = all(w.dtype in (torch.float32, torch.float64) for w in weights)
        small = max(1, len(adapters)) * self.bytes <= MERGED_BYTES
        # Merging into a lower precision rounds adapters away; quantized weights cannot be merged.
        self.merging = (not adapters or exact) and small and not self.quantized
        self._product_cache: dict[Any, Any] | None = None
        # ``extended`` is built here, because agents may be updated in parallel threads.
        frozen = all(product.fused is not None for product in self.products)
        self.extends_updates = bool(learning and frozen and adapters and self.extended.adapters)

    def hidden(
        self,
        ids_T: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attend: Attend,
        routes: Routes,
        wanted_W: Tensor | None = None,
        wanted_routes: Routes | None = None,
    ) -> Tensor:
        """Return the last hidden states, (T, D), or (W, D) of the tokens at ``wanted_W``.

        After the last layer's attention, other tokens are not computed. ``wanted_routes``: the
        routes of the wanted tokens; None: ``routes``.
        """
        step = self.layer
        if self.checkpointing and torch.is_grad_enabled():
            # A layer draws no random numbers.
            step = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False)
        x = self.embedding(ids_T)
        for index in range(len(self.layers) - 1):
            x = step(index, x, cos_sin, attend, routes, routes)
        last = routes if wanted_routes is None else wanted_routes
        x = step(len(self.layers) - 1, x, cos_sin, attend, routes, last, wanted_W)
        return rms_norm(x, self.norm.weight, self.norm.variance_epsilon)

    def layer(
        self,
        index: int,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attend: Attend,
        routes: Routes,
        routes_after: Routes,
        wanted_W: Tensor | None = None,
    ) -> Tensor:
        """Return a layer's output for all tokens, or for those at ``wanted_W``.

        ``routes_after``: the routes after attention.
        """
        layer, (cos, sin) = self.layers[index], cos_sin
        norm = layer.input_norm
        y = rms_norm(x, norm.weight, norm.variance_epsilon)
        y = self.product(layer.qkv, y, routes).view(len(x), -1, self.width)
        y = y if layer.head_norms is None else layer.head_norms(y)
        y = rotate(y, cos, sin, self.heads + self.kv_heads)
        y = attend(index, y)
        if wanted_W is not None:
            x = x.index_select(0, wanted_W)
        x = x + self.product(layer.out, y, routes_after)
        norm = layer.post_attention_norm
        y = rms_norm(x, norm.weight, norm.variance_epsilon)
        y = swiglu(self.product(layer.gate_up, y, routes_after))
        return x + self.product(layer.down, y, routes_after)

    def compiled_hidden(
        self,
        ids_T: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attend: Attend,
        wanted_W: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states under the active adapter, through compiled layers."""
        ((name, _),) = self.acting()
        heads, eps = (self.heads, self.kv_heads, self.kv_heads), self.norm.variance_epsilon
        x = self.embedding(ids_T)
        for index, layer in enumerate(self.layers):
            products = (layer.qkv, layer.out, layer.gate_up, layer.down)
            qkv, out, gate_up, down = (product.tensors(name) for product in products)
            norms = layer.head_norms.norms if layer.head_norms else ()
            weights = [norm.weight for norm, _ in norms]
            norm = layer.input_norm.weight
            y = call(before_attention, [x], norm, qkv, weights, cos_sin, heads, eps)
            y = attend(index, y)
            if wanted_W is not None and index == len(self.layers) - 1:
                x = x.index_select(0, wanted_W)
            norm = layer.post_attention_norm.weight
            x = call(after_attention, [x, y], out, norm, gate_up, down, eps)
        return rms_norm(x, self.norm.weight, self.norm.variance_epsilon)

    @cached_property
    def extended(self) -> ExtendedWeights:
        """The products' weights, extended by all adapters as of the last ``refresh``."""
        return ExtendedWeights(self.products, self.names)

    @property
    def step(self) -> int:
        """The multiple to which token counts should be rounded."""
        weight = self.embedding.weight
        if self.compiled:
            return compiled_update.TOKEN_STEP
        if self.tree and weight.is_cuda:
            return BLOCK
        return shape_step(weight.device, weight.dtype, self.bytes)

    def pack(self, batch: TokenBatch) -> Packed:
        """Return a batch's distinct tokens, as input of ``packed``."""
        return Packed(batch, self.embedding.weight.device, self.step, tree=self.tree)

    def packed(self, batch: Packed, wanted_A: Tensor | None = None) -> Tensor:
        """Return a packed batch's last hidden states under the active adapter.

        The shape is (T, D), or (A, D) for the tokens ``wanted_A``, a CPU tensor that may repeat
        tokens.
        """
        if self.extends_updates:
            self.extended.refresh([name for name, _ in self.acting() if name is not None])
        compiled = self.compiled and isinstance(batch.all_tokens, TreePlan)
        hidden = self.compiled_hidden if compiled else partial(self.hidden, routes=self.acting())
        rotations = self.rotations(batch.positions_T)
        if wanted_A is None:
            attend = self.attention(batch, batch.all_tokens)
            return hidden(batch.ids_T, rotations, attend)
        wanted_W, of_A = wanted_A.unique(return_inverse=True)
        count = len(wanted_W)
        rows_W = F.pad(wanted_W, (0, rounded(count, self.step) - count))  # padded with token 0
        attend = self.attention(batch, batch.read(wanted_W, len(rows_W)))
        device = batch.ids_T.device
        hidden_WD = hidden(batch.ids_T, rotations, attend, wanted_W=rows_W.to(device))
        return gather(hidden_WD, Gather.from_rows(of_A, len(rows_W)).to(device))

    def attention(
        self,
        batch: Packed,
        last: AttentionPlan | TreePlan,
        keep: Callable[..., object] | None = None,
    ) -> Attend:
        """Return the attention function of a packed batch.

        ``last``: the plan of the last layer; ``keep``: called with the prompts' keys and values of
        each layer.
        """

        def attend(layer: int, qkv_THW: Tensor) -> Tensor:
            plan = last if layer == len(self.layers) - 1 else batch.all_tokens
            keep_layer = None if keep is None else partial(keep, layer=layer)
            return plan.attention(qkv_THW, self.heads, self.kv_heads, self.scaling, keep_layer)

        return attend

    def rotations(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin), (T, 1, width), for ``hidden``."""
        dtype = self.embedding.weight.dtype
        like = torch.empty((), dtype=dtype, device=positions_T.device)
        cos, sin = self.rotary(like, positions_T[None])
        sin = sin.clone()
        sin[..., : self.width // 2].neg_()
        return cos[0, :, None], sin[0, :, None]

    def acting(self) -> Routes:
        """Route all tokens through this thread's active adapter (None: the base)."""
        return [(None if self.router is None else self.router.adapter, slice(None))]

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Cache results that depend on the weights alone; weights must not change within."""
        self._product_cache = {}
        try:
            yield
        finally:
            self._product_cache = None

    def product(self, product: Product, x: Tensor, routes: Routes) -> Tensor:
        if self._product_cache is not None and not torch.is_grad_enabled():
            return self._sampled(product, x, routes, self._product_cache)
        ((name, _),) = routes  # except in sampling, a pass is for one agent
        adapters = self.extended.adapters if self.extends_updates else {}
        if name is not None and (product, name) in adapters:
            return adapters[product, name].product(x)
        y = product.base(x)
        adapter = None if name is None else product.adapter(name, x.dtype)
        return y if adapter is None else torch.addmm(y, x @ adapter[0], adapter[1])

    def _sampled(
        self, product: Product, x: Tensor, routes: Routes, cache: dict[Any, Any]
    ) -> Tensor:
        """Return (W + s B A) x with merged weights if ``merging``, else W x + s B A x."""
        if self.merging:
            for name, _ in routes:
                if (product, name) not in cache:
                    cache[product, name] = product.merged(name)
            parts = [F.linear(x[rows], *cache[product, name]) for name, rows in routes]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        # A x of all agents, masked by row, then B: few products of all rows, not many of parts.
        names = tuple(name for name, _ in routes)
        if (product, names) not in cache:
            base = None if product.quantized else product.merged(None)
            cache[product, names] = base, product.adapters(names, x.dtype)
        base, sides = cache[product, names]
        y = product.base(x) if base is None else F.linear(x, *base)
        if sides is None:
            return y
        low = x @ sides[0]
        if len(names) > 1:
            if cache.get("routes") is not routes:
                owner_RN = x.new_zeros(len(x), len(names))
                for number, (_, rows) in enumerate(routes):
                    owner_RN[rows, number] = 1
                cache |= {"routes": routes, "owners": owner_RN}
            low.view(len(x), len(names), -1).mul_(cache["owners"][:, :, None])
        return y.addmm_(low, sides[1])


def fast_decoder(
    model: PreTrainedModel,
    router: Router | None,
    adapters: Sequence[str] = (),
    learning: bool = True,
) -> FastDecoder | None:
    """Return a fast decoder, or None for other model families or non-linear layers.

    ``adapters``: names of the agents' adapters; ``learning``: whether updates may use it too.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    ordinary = (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and rope.get("rope_type") in STATIC_ROPES
        and full_attention(config)
        and config._attn_implementation in ("sdpa", "eager")
        and len(set(getattr(model, "hf_device_map", {}).values())) < 2
        and (not adapters or router is not None)
    )
    if not ordinary or not all(_plain(m) for m in _projections(model)):
        return None
    ends: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(hasattr(end, "lora_A") for end in ends):  # not supported
        return None
    return FastDecoder(model, router, adapters, learning)


def _projections(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _plain(layer: Any) -> bool:
    linear = getattr(layer, "base_layer", layer)
    ordinary = type(linear) is torch.nn.Linear and type(linear.weight.data) is Tensor
    return ordinary or is_quantized(linear)
