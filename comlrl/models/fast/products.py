"""Linear layers of one input as one product, and their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.lora_routing import is_quantized


class Product:
    """Linear layers of one input as one: [W₁; W₂; …] x + b, and each one's own LoRA.

    Quantized layers are not fused.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.linears: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears]
        self.fused: Tensor | None = None  # of frozen layers
        self.quantized = any(map(is_quantized, self.linears))
        for linear in filter(is_quantized, self.linears):
            linear.train()  # else bitsandbytes packs weights on a CPU so that no gradient passes
        if self.quantized or any(w.requires_grad for w in weights):
            return
        self.bias = None if biases[0] is None else torch.cat([b.data for b in biases])
        self.fused = weights[0].data
        if len(weights) > 1:
            self.share(torch.cat([w.data for w in weights]))

    def share(self, fused: Tensor) -> None:
        """Make the layers' weights views of this one, so that nothing is held twice."""
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
        """Return the adapters side by side, (in, n r) and (n r, out); None if there are none."""
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
        mine = [layer if name in getattr(layer, "lora_A", ()) else None for layer in self.layers]
        if not any(layer is not None for layer in mine):
            return None
        down, up = [], []
        for layer, linear in zip(mine, self.linears, strict=True):
            if layer is None:
                device = linear.weight.device
                up.append(torch.zeros(linear.out_features, 0, dtype=dtype, device=device))
                continue
            down.append(layer.lora_A[name].weight.to(dtype))
            up.append((layer.lora_B[name].weight * layer.scaling[name]).to(dtype))
        if len(mine) == 1:
            return down[0].t(), up[0].t()
        return torch.cat(down).t(), torch.block_diag(*up).t()
