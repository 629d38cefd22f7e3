"""Linear layers with the same input as one product, and their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.lora_routing import is_quantized


class ProductTensors(NamedTuple):
    """The tensors of a product: weights and biases, per layer or fused into one; A, B and the scale
    of each layer's adapter."""

    base: Sequence[tuple[Tensor, Tensor | None]]
    adapters: Sequence[tuple[Tensor, Tensor, float]]


class Product:
    """Linear layers with the same input as one, [W₁; W₂; …] x + b, and the LoRA of each layer.

    Quantized layers are not fused.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.linears: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears]
        self.fused: Tensor | None = None  # weights, if all layers are frozen
        self.quantized = any(map(is_quantized, self.linears))
        for linear in filter(is_quantized, self.linears):
            linear.train()  # in eval mode on a CPU, bitsandbytes packs weights and blocks gradients
        if self.quantized or any(w.requires_grad for w in weights):
            return
        self.bias = None if biases[0] is None else torch.cat([b.data for b in biases])
        self.fused = weights[0].data
        if len(weights) > 1:
            self.share(torch.cat([w.data for w in weights]))

    def share(self, fused: Tensor) -> None:
        """Make the layers' weights views of ``fused``, so that nothing is stored twice."""
        self.fused = fused
        parts = fused.split([linear.out_features for linear in self.linears])
        for linear, part in zip(self.linears, parts, strict=True):
            linear.weight.data = part

    def base(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return F.linear(x, self.fused, self.bias)
        parts = [linear(x) for linear in self.linears]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def adapters(
        self, names: Sequence[str | None], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Return the concatenated adapters, (in, n r) and (n r, out); None if there are none."""
        pairs = [None if name is None else self.adapter(name, dtype) for name in names]
        present = [pair for pair in pairs if pair is not None]
        if not present:
            return None
        assert len(present) == len(names), "the base alone never shares a batch with adapters"
        downs, ups = zip(*present, strict=True)
        return torch.cat(downs, 1).contiguous(), torch.cat(ups)

    def merged(self, name: str | None) -> tuple[Tensor, Tensor | None]:
        """Return (W + s B A, b) of one agent, or of the base alone."""
        if self.fused is not None:
            weight, bias = self.fused, self.bias
        else:
            biases = [linear.bias for linear in self.linears]
            bias = None if biases[0] is None else torch.cat(biases)
            weight = torch.cat([linear.weight for linear in self.linears])
        if name is not None and (adapter := self.adapter(name, weight.dtype)) is not None:
            weight = torch.addmm(weight, adapter[1].t(), adapter[0].t())
        return weight, bias

    def adapter(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return (Aᵀ, s Bᵀ) of all layers, (in, r) and (r, out)."""
        adapters = self.adapter_tensors(name)
        return joint_matrices(adapters, dtype) if adapters else None

    def tensors(self, name: str | None) -> ProductTensors:
        """Return the product under an agent's adapter as an argument of a compiled function."""
        base = [(linear.weight, linear.bias) for linear in self.linears]
        base = base if self.fused is None else [(self.fused, self.bias)]
        return ProductTensors(base, self.adapter_tensors(name))

    def adapter_tensors(self, name: str | None) -> list[tuple[Tensor, Tensor, float]]:
        """Return A, B and s of each layer, of rank 0 without an adapter; [] if no layer has one."""
        has = [name in getattr(layer, "lora_A", ()) for layer in self.layers]
        adapters = []
        for layer, linear, adapted in zip(self.layers, self.linears, has, strict=True):
            if adapted:
                down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
                adapters.append((down, up, layer.scaling[name]))
            else:
                empty = torch.empty(0, device=linear.weight.device)
                down, up = empty.view(0, linear.in_features), empty.view(linear.out_features, 0)
                adapters.append((down, up, 1.0))
        return adapters if any(has) else []


def joint_matrices(
    adapters: Sequence[tuple[Tensor, Tensor, float]], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (Aᵀ, s Bᵀ) of a product's layers, (in, r) and (r, out)."""
    downs = [down.to(dtype) for down, _, _ in adapters]
    ups = [(up * scaling).to(dtype) for _, up, scaling in adapters]
    if len(adapters) == 1:
        return downs[0].t(), ups[0].t()
    return torch.cat(downs).t(), torch.block_diag(*ups).t()
