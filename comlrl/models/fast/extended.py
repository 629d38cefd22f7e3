"""The base and its adapters in one product, rounded once::

    y = [x | m ∘ A x] [W | s B]ᵀ + b

A and B concatenate the adapters of all agents. The mask m is 1 in the part of a row's adapter, so
that the rows of all agents are one product. The weights of a frozen base become views of the
extended ones, to store nothing twice. After an update only A and B are copied, into the same
memory. Updates, whose rows belong to one agent, use that agent's columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.products import Product


class Extended(NamedTuple):
    """A product's weights with N adapters of k columns each."""

    weight: Tensor  # [W | s B], (out, in + N k)
    bias: Tensor | None
    down: Tensor | None  # A, (N k, in); None: no adapters


def extended_linear(
    x: Tensor, extended: Extended, owner_RN: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Return the product of rows x, (R, in), plus ``residual``. ``owner_RN``: m, per adapter."""
    if extended.down is not None:
        low = x @ extended.down.t()
        count = owner_RN.shape[1]
        if count > 1:
            low.view(len(x), count, -1).mul_(owner_RN[:, :, None])
        x = torch.cat([x, low], 1)
    if residual is not None and extended.bias is None:
        return torch.addmm(residual, x, extended.weight.t())
    y = F.linear(x, extended.weight, extended.bias)
    return y if residual is None else residual + y


class Adapter(NamedTuple):
    """A product's weights and one agent's adapter; k is the sum of its layers' ranks."""

    base: Tensor  # W, (out, in)
    bias: Tensor | None
    down: Tensor  # A, (k, in)
    up: Tensor  # s B, (out, k)
    layers: list[AdaptedLayer]

    def product(self, x: Tensor) -> Tensor:
        """Return the product of rows x, (R, in), differentiable with respect to x, A and B."""
        matrices = [matrix for layer in self.layers for matrix in (layer.down, layer.up)]
        return AdaptedProduct.apply(x, self, *matrices)


class AdaptedLayer(NamedTuple):
    """A layer's trained matrices and where they lie in the product."""

    down: Tensor  # A, (r, in)
    up: Tensor  # B, (rows, r)
    scaling: float
    rows: slice
    ranks: slice


class AdaptedProduct(torch.autograd.Function):
    """y = x Wᵀ + b + l (s B)ᵀ with l = x Aᵀ, from copies in the precision of x.

    With g = ∂L/∂y: ∂L/∂x = g W + (g s B) A, ∂L/∂A = (g s B)ᵀ x, and ∂L/∂B = s gᵀ l. The last two
    are float32 on a GPU, and in the precision of x elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, adapter: Adapter, *parameters: Tensor) -> Tensor:
        low = x @ adapter.down.t()
        ctx.adapter = adapter
        ctx.save_for_backward(x, low)
        return F.linear(x, adapter.base, adapter.bias).addmm_(low, adapter.up.t())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), adapter = grads, ctx.adapter
        x, low = ctx.saved_tensors
        low_grad = grad @ adapter.up
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = (grad @ adapter.base).addmm_(low_grad, adapter.down)
        down_grad = _float32_product(low_grad.t(), x)
        for_parameters = []
        for layer in adapter.layers:
            up_grad = _float32_product(grad[:, layer.rows].t(), low[:, layer.ranks])
            for_parameters += [down_grad[layer.ranks], up_grad.mul_(layer.scaling)]
        return for_x, None, *for_parameters


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b; on a GPU, as float32 if the inputs are 16-bit."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


class ExtendedWeights:
    """The extended weights of a decoder's products; ``refresh`` copies updated weights."""

    of_product: Mapping[Product, Extended]

    def __init__(self, products: Sequence[Product], names: Sequence[str]) -> None:
        """Extend products by the adapters of these names."""
        self.names = tuple(names)
        self.copies: list[tuple[Tensor, Tensor]] = []  # (target, source) of trained base weights
        self.adapters: dict[tuple[Product, str], Adapter] = {}
        self.of_product = {product: self._extend(product) for product in products}

    def _extend(self, product: Product) -> Extended:
        linears = product.linears
        counts = [linear.out_features for linear in linears]
        starts = itertools.accumulate(counts[:-1], initial=0)
        adapted = [
            (layer, slice(start, start + count))
            for layer, count, start in zip(product.layers, counts, starts, strict=True)
            if any(name in getattr(layer, "lora_A", ()) for name in self.names)
        ]
        ranks = [layer.r[self.names[0]] for layer, _ in adapted]
        like, width = linears[0].weight, linears[0].in_features
        total = len(self.names) * sum(ranks)
        if total == 0 and product.fused is not None:
            return Extended(product.fused, product.bias, None)
        weight = like.new_zeros(sum(counts), width + total)
        down = like.new_zeros(total, width) if total else None
        bias: Tensor | None = None
        if product.fused is None:  # trained: a copy, which an update makes stale
            parts = weight.split(counts)
            pairs = zip(parts, linears, strict=True)
            self.copies += [(part[:, :width], linear.weight) for part, linear in pairs]
            if linears[0].bias is not None:
                bias = like.new_zeros(sum(counts))
                biases = zip(bias.split(counts), linears, strict=True)
                self.copies += [(part, linear.bias) for part, linear in biases]
        else:
            weight[:, :width] = product.fused
            bias = product.bias
            product.share(weight[:, :width])
        if down is not None:
            base, *ups = weight.split([width] + [sum(ranks)] * len(self.names), 1)
            for name, down_part, up in zip(self.names, down.chunk(len(ups)), ups, strict=True):
                layers = _adapted_layers(name, adapted, ranks)
                self.adapters[product, name] = Adapter(base, bias, down_part, up, layers)
        return Extended(weight, bias, down)

    @torch.no_grad()
    def refresh(self, names: Sequence[str] | None = None) -> None:
        """Copy updated weights into the same memory. ``names``: of these adapters; None: of all."""
        places, sources = [place for place, _ in self.copies], [x for _, x in self.copies]
        adapters = [
            (adapter, layer)
            for (_, name), adapter in self.adapters.items()
            if names is None or name in names
            for layer in adapter.layers
        ]
        if adapters:
            places += [adapter.down[layer.ranks] for adapter, layer in adapters]
            sources += [layer.down for _, layer in adapters]
            places += [adapter.up[layer.rows, layer.ranks] for adapter, layer in adapters]
            ups, factors = zip(*[(layer.up, layer.scaling) for _, layer in adapters], strict=True)
            sources += torch._foreach_mul(ups, list(factors))
        if places:
            torch._foreach_copy_(places, [source.detach() for source in sources])


def _adapted_layers(
    name: str, adapted: Sequence[tuple[Any, slice]], ranks: Sequence[int]
) -> list[AdaptedLayer]:
    """Return an adapter's matrices in these layers of a product, each with its rows."""
    return [
        AdaptedLayer(
            layer.lora_A[name].weight,
            layer.lora_B[name].weight,
            layer.scaling[name],
            rows,
            slice(end - rank, end),
        )
        for (layer, rows), rank, end in zip(
            adapted, ranks, itertools.accumulate(ranks), strict=True
        )
    ]
