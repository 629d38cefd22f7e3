"""A decoding step whose operations, shapes and addresses are the same at every step.

Everything that a step reads or writes lies in tensors that are made once for a batch's bucket, the
number of the step included, so that a GPU can replay it as a CUDA graph (``graphs.py``) and the
host waits for nothing within it. Rows are a full grid of prompts × siblings; those that nobody
asked for are dead. Attention goes over the bucket's lengths, with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.attention import wide
from comlrl.models.fast.decoder import FastDecoder, Product

# They follow from the batch alone, never from free memory, so that a resumed run has the same.
ROW_BUCKETS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LENGTH_STEP = 128  # tokens of prompts
TOKEN_BUCKETS = (64, 128, 256, 512, 1024)


def bucket(count: int, buckets: Sequence[int]) -> int:
    """Return the least bucket that holds ``count``; beyond the last, a multiple of it."""
    fitting = (size for size in buckets if size >= count)
    return next(fitting, -(-count // buckets[-1]) * buckets[-1])


def grid_of(prompts: int, siblings: int) -> int:
    """Return the number of prompts whose siblings fill a bucket of rows best."""
    return max(prompts, bucket(prompts * siblings, ROW_BUCKETS) // siblings)


class StaticProducts:
    """A decoder's products with the adapters of all agents beside the base.

    y = W x + b + [B₀ B₁ …] (m ∘ [A₀; A₁; …] x), where m is 1 in the part of a row's own adapter.
    """

    def __init__(self, fast: FastDecoder, names: Sequence[str | None], owner_RN: Tensor) -> None:
        self.names, self.owner_RN = tuple(names), owner_RN
        self.held: dict[Product, tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]] = {}
        for layer in fast.layers:
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                sides = product.adapters(self.names, product.linears[0].weight.dtype)
                self.held[product] = (*product.merged(None), sides)

    def refresh(self) -> None:
        """Copy weights that an update has changed, into the same memory."""
        for product, (weight, bias, sides) in self.held.items():
            if product.fused is None:
                now, bias_now = product.merged(None)
                weight.copy_(now)
                if bias is not None and bias_now is not None:
                    bias.copy_(bias_now)
            fresh = product.adapters(self.names, weight.dtype)
            if sides is not None and fresh is not None:
                for mine, other in zip(sides, fresh, strict=True):
                    mine.copy_(other)

    def __call__(self, product: Product, x: Tensor) -> Tensor:
        weight, bias, sides = self.held[product]
        y = F.linear(x, weight, bias)
        if sides is None:
            return y
        low = x @ sides[0]
        if len(self.names) > 1:
            low.view(len(x), len(self.names), -1).mul_(self.owner_RN[:, :, None])
        return y.addmm_(low, sides[1])


class StaticBatch:
    """The state of R = P · G rows that decode up to T tokens after prompts of up to L."""

    def __init__(
        self,
        fast: FastDecoder,
        names: Sequence[str | None],
        prompts: int,
        siblings: int,
        length: int,
        tokens: int,
    ) -> None:
        """Initialize the batch. ``names``: the adapters in the batch, each once."""
        self.fast, self.siblings, self.capacity = fast, siblings, tokens
        weight = fast.embedding.weight
        self.device, rows = weight.device, prompts * siblings
        kv, width = fast.kv_heads, fast.width
        dtype = wide(torch.empty(0, dtype=weight.dtype, device=self.device)).dtype

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        count = len(fast.layers)
        self.prefix_key = [new(prompts, kv, width, length) for _ in range(count)]
        self.prefix_value = [new(prompts, kv, length, width) for _ in range(count)]
        self.own_key = [new(rows, kv, tokens, width) for _ in range(count)]
        self.own_value = [new(rows, kv, tokens, width) for _ in range(count)]
        self.bias_PL = new(prompts, length)
        self.length_R = new(rows, dtype=torch.long)
        self.t = new(1, dtype=torch.long)  # the step
        self.at_T = torch.arange(tokens, device=self.device)
        self.token_R = new(rows, dtype=torch.long)  # each row's newest
        self.hidden_RD = new(rows, weight.shape[1], dtype=weight.dtype)
        self.cos, self.sin = fast.rotations(torch.arange(length + tokens, device=self.device))
        owner_RN = new(rows, len(names), dtype=weight.dtype)
        self.products = StaticProducts(fast, names, owner_RN)

    def begin(
        self,
        prefix: Sequence[tuple[Tensor, Tensor]],
        lengths_P: Tensor,
        hidden_PD: Tensor,
        agent_P: Tensor,
    ) -> None:
        """Start with these prompts, which may be fewer than P.

        ``prefix``: each layer's keys (P, kv heads, width, L) and values (P, kv heads, L, width).
        ``hidden_PD``: of the prompts' last tokens. ``agent_P``: places among ``names``.
        """
        count, length = len(lengths_P), prefix[0][0].shape[-1]
        for layer, (key, value) in enumerate(prefix):
            # What lies outside has weight 0, but 0 · NaN of a batch before would be NaN.
            self.prefix_key[layer].zero_()[:count, :, :, :length] = key
            self.prefix_value[layer].zero_()[:count, :, :length] = value
            self.own_key[layer].zero_()
            self.own_value[layer].zero_()
        lengths = F.pad(lengths_P, (0, len(self.bias_PL) - count))
        columns = torch.arange(self.bias_PL.shape[1], device=self.device)
        self.bias_PL.zero_().masked_fill_(columns >= lengths[:, None], -torch.inf)
        self.length_R.copy_(lengths.repeat_interleave(self.siblings))
        self.hidden_RD.zero_()
        self.hidden_RD[: count * self.siblings] = hidden_PD.repeat_interleave(self.siblings, 0)
        owner_RN = self.products.owner_RN
        agent_R = F.pad(agent_P, (0, len(lengths) - count)).repeat_interleave(self.siblings)
        owner_RN.copy_(agent_R[:, None] == torch.arange(owner_RN.shape[1], device=self.device))
        self.t.zero_()
        self.products.refresh()

    def step(self, reach: int) -> None:
        """Put the newest token of each row through the model.

        ``reach``: how many of the rows' own tokens are looked at, more than the step's number.
        """
        position_R = self.length_R + self.t
        rotations = self.cos.index_select(0, position_R), self.sin.index_select(0, position_R)
        bias_T = torch.zeros(reach, dtype=self.bias_PL.dtype, device=self.device)
        bias_T.masked_fill_(self.at_T[:reach] > self.t, -torch.inf)

        def attend(layer: int, qkv_RHW: Tensor) -> Tensor:
            return self._attend(layer, qkv_RHW, bias_T)

        hidden_RD = self.fast.hidden(self.token_R, rotations, attend, self.products)
        self.hidden_RD.copy_(hidden_RD)
        self.t.add_(1)

    def _attend(self, layer: int, qkv_RHW: Tensor, bias_T: Tensor) -> Tensor:
        heads, kv, width = self.fast.heads, self.fast.kv_heads, self.fast.width
        prompts, length = self.bias_PL.shape
        rows, group, reach = len(qkv_RHW), heads // kv, len(bias_T)
        query, key, value = wide(qkv_RHW).split((heads, kv, kv), 1)
        keys, values = self.own_key[layer], self.own_value[layer]
        keys.index_copy_(2, self.t, key[:, :, None])
        values.index_copy_(2, self.t, value[:, :, None])

        def spread(x: Tensor) -> Tensor:  # (R, kv, heads of each, n) → (P, kv, G · heads, n)
            grid = x.view(prompts, self.siblings, kv, group, -1).transpose(1, 2)
            return grid.reshape(prompts, kv, self.siblings * group, -1)

        def gather(x: Tensor) -> Tensor:
            grid = x.view(prompts, kv, self.siblings, group, -1).transpose(1, 2)
            return grid.reshape(rows, kv, group, -1)

        query = query.reshape(rows, kv, group, width) * self.fast.scaling
        to_prefix = spread(query) @ self.prefix_key[layer]
        to_prefix += self.bias_PL[:, None, None]
        to_own = query @ keys[:, :, :reach].transpose(-1, -2)
        to_own += bias_T
        scores = torch.cat([gather(to_prefix), to_own], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        out = weights[..., length:] @ values[:, :, :reach]
        out = out + gather(spread(weights[..., :length]) @ self.prefix_value[layer])
        return out.reshape(rows, heads * width).to(qkv_RHW.dtype)
