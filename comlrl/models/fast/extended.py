"""Adapters inside the base's products, rounded once::

    y = [x | m ∘ A x] [W | s B]ᵀ + b

A and B hold the adapters of all agents side by side; m is 1 in the part of a row's adapter, so that
all agents' rows are one product. The weights of a frozen base become views of its extended ones:
nothing is held twice. After an update only A and B are copied, into the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    """Return the product of rows x, (R, in), plus ``residual``; ``owner_RN``: m of each adapter."""
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


class ExtendedWeights:
    """The extended weights of a decoder's products, and what an update changes of them."""

    of_product: Mapping[Product, Extended]

    def __init__(self, products: Sequence[Product], names: Sequence[str]) -> None:
        """Extend products by the adapters of these names."""
        self.names = tuple(names)
        self.copies: list[tuple[Tensor, Tensor]] = []  # (place, what is copied there)
        self.scaled: list[tuple[Tensor, Tensor, float]] = []  # and by which factor
        self.of_product = {product: self._extend(product) for product in products}

    def _extend(self, product: Product) -> Extended:
        linears = product.linears
        rows = [linear.out_features for linear in linears]
        starts = itertools.accumulate(rows[:-1], initial=0)
        adapted = [
            (layer, start, start + count)
            for layer, count, start in zip(product.layers, rows, starts, strict=True)
            if any(name in getattr(layer, "lora_A", ()) for name in self.names)
        ]
        ranks = [layer.r[self.names[0]] for layer, _, _ in adapted]
        like, width = linears[0].weight, linears[0].in_features
        total = len(self.names) * sum(ranks)
        if total == 0 and product.fused is not None:
            return Extended(product.fused, product.bias, None)
        weight = like.new_zeros(sum(rows), width + total)
        down = like.new_zeros(total, width) if total else None
        bias: Tensor | None = None
        if product.fused is None:  # trained: a copy, which an update makes stale
            parts = weight.split(rows)
            pairs = zip(parts, linears, strict=True)
            self.copies += [(part[:, :width], linear.weight) for part, linear in pairs]
            if linears[0].bias is not None:
                bias = like.new_zeros(sum(rows))
                biases = zip(bias.split(rows), linears, strict=True)
                self.copies += [(part, linear.bias) for part, linear in biases]
        else:
            weight[:, :width] = product.fused
            bias = product.bias
            product.share(weight[:, :width])
        at = 0
        for name in self.names:
            for (layer, start, end), rank in zip(adapted, ranks, strict=True):
                assert down is not None
                self.copies.append((down[at : at + rank], layer.lora_A[name].weight))
                place = weight[start:end, width + at : width + at + rank]
                self.scaled.append((place, layer.lora_B[name].weight, layer.scaling[name]))
                at += rank
        return Extended(weight, bias, down)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what an update has changed, into the same memory."""
        places, sources = [place for place, _ in self.copies], [x for _, x in self.copies]
        if self.scaled:
            _, ups, factors = zip(*self.scaled, strict=True)
            places += [place for place, _, _ in self.scaled]
            sources += torch._foreach_mul(ups, list(factors))
        if places:
            torch._foreach_copy_(places, [source.detach() for source in sources])
