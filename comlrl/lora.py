"""PEFT's LoRA layers with a leaner forward pass; the same parameters, files and numbers.

    y = W x + b + B (s · A x)

PEFT scales and adds at the full width and casts activations to the adapter's float32. Here the
scale is applied at the rank's width, the sum is one fused product, and the adapter's small
matrices are cast to the activations' precision instead. While sampling, each block of rows goes
through its own agent's adapter, so that all agents of one base decode in one batch; small float32
models do so through merged weights W + s B A, which costs no more than the base alone. (In lower
precisions merging would round the adapter away.)
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from transformers import PreTrainedModel

MERGED_BYTES = 1 << 30  # merged weights of all agents together, while sampling


class Router(threading.local):
    """Which adapter a row goes through, for the calling thread; one for each model."""

    def __init__(self) -> None:
        self.adapter: str | None = None  # of all rows; None: PEFT's active one
        self.off = False  # the base alone
        self.routes: list[tuple[str, slice]] | None = None  # of blocks of rows, while sampling
        self.merging = False  # agents' own weights while sampling, instead of their adapters
        self._cast: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self._merged: dict[tuple[int, str], torch.Tensor] = {}

    def matrices(self, layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(Aᵀ, s Bᵀ) in the base's precision, made once a sampling phase."""
        key = (id(layer), name)
        if key not in self._cast:
            dtype = layer.base_layer.weight.dtype
            up = layer.lora_B[name].weight * layer.scaling[name]
            self._cast[key] = layer.lora_A[name].weight.to(dtype).t(), up.to(dtype).t()
        return self._cast[key]

    def merged(self, layer: Any, name: str) -> torch.Tensor:
        """(W + s B A)ᵀ of one agent, made once a sampling phase."""
        key = (id(layer), name)
        if key not in self._merged:
            self._merged[key] = (layer.base_layer.weight + layer.get_delta_weight(name)).t()
        return self._merged[key]

    @contextlib.contextmanager
    def sampling(self, merging: bool) -> Iterator[None]:
        """A phase of one batch: adapters do not change within it, gradients are not kept."""
        self.merging = merging
        try:
            yield
        finally:
            self.routes = None
            self._cast.clear()
            self._merged.clear()

    @contextlib.contextmanager
    def only(self, adapter: str | None) -> Iterator[None]:
        """All rows go through this adapter; None: through none."""
        before = self.adapter, self.off
        self.adapter, self.off = adapter, adapter is None
        try:
            yield
        finally:
            self.adapter, self.off = before

    def route(self, names: Sequence[str], counts: Sequence[int]) -> None:
        """From here on the first ``counts[0]`` rows are ``names[0]``'s, and so on."""
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.routes = [
            (name, slice(end - count, end))
            for name, count, end in zip(names, counts, ends, strict=True)
            if count
        ]


def make_lean(model: PreTrainedModel) -> Router | None:
    """Give the model's LoRA layers the lean forward pass and a common router.

    None where a layer is of another kind than an ordinary linear one (quantized, DoRA, …): then
    all of them stay PEFT's.
    """
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    others = [m for m in model.modules() if hasattr(m, "lora_A") and not isinstance(m, Linear)]
    if others or not all(_ordinary(layer) for layer in layers):
        return None
    router = Router()
    for layer in layers:
        layer.router = router  # type: ignore[assignment]
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
    return router


def mergeable(model: PreTrainedModel, agents: int) -> bool:
    """Whether merged weights of each agent are exact (float32) and small enough to hold."""
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    weights: list[Any] = [layer.get_base_layer().weight for layer in layers]
    exact = all(w.dtype in (torch.float32, torch.float64) for w in weights)
    return exact and agents * sum(w.nbytes for w in weights) <= MERGED_BYTES


def _ordinary(layer: Any) -> bool:
    plain = type(layer) is Linear and type(layer.base_layer) is torch.nn.Linear
    return plain and not any(layer.use_dora.values()) and not any(layer.lora_bias.values())


def _forward(layer: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    router = layer.router
    if router.merging and router.routes is not None:
        return _merged_forward(layer, x, router)
    base = F.linear(x, layer.base_layer.weight, layer.base_layer.bias)
    if layer.disable_adapters or router.off:
        return base
    width = base.shape[-1]
    if router.routes is not None:
        for name, rows in router.routes:
            down, up = router.matrices(layer, name)
            low = x[rows].reshape(-1, x.shape[-1]) @ down
            base[rows].view(-1, width).addmm_(low, up)
        return base
    name = router.adapter or layer.active_adapters[0]
    down, up = layer.lora_A[name].weight.to(x.dtype), layer.lora_B[name].weight.to(x.dtype)
    low = F.linear(layer.lora_dropout[name](x), down) * layer.scaling[name]
    rows = base.view(-1, width)
    return torch.addmm(rows, low.view(-1, low.shape[-1]), up.t()).view(base.shape)


def _merged_forward(layer: Any, x: torch.Tensor, router: Router) -> torch.Tensor:
    """Each agent's rows through its own W + s B A: one product an agent."""
    bias = layer.base_layer.bias
    flat = x.reshape(-1, x.shape[-1])
    each = len(flat) // len(x)  # tokens of a row
    out = flat.new_empty(len(flat), layer.base_layer.out_features)
    for name, rows in router.routes or ():
        part = slice(rows.start * each, rows.stop * each)
        weight = router.merged(layer, name)
        if bias is None:
            torch.mm(flat[part], weight, out=out[part])
        else:
            torch.addmm(bias, flat[part], weight, out=out[part])
    return out.view(*x.shape[:-1], -1)
