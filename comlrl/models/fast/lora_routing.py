"""A shorter forward pass of PEFT's LoRA layers, with the same parameters, files and results.

    y = W x + b + B (s · A x)

PEFT scales and adds at the full width and casts activations to the adapter's float32. Here the
scale is applied at the rank's width, the sum is one fused product, and the adapter's small
matrices are cast to the activations' precision instead. While sampling, each block of rows uses its
agent's adapter, so that all agents of one base decode in one batch. (``decoder.py`` goes further,
for the model families that it supports.)
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from transformers import PreTrainedModel


class Router(threading.local):
    """Selects the adapter of each row, for the calling thread; one router per model."""

    def __init__(self, default: str) -> None:
        self.adapter: str | None = default  # for all rows; None: the base alone
        # Adapters of blocks of rows, while sampling.
        self.routes: Sequence[tuple[str | None, slice]] | None = None
        self._cast: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def matrices(
        self, layer: Any, name: str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (Aᵀ, s Bᵀ) in the activations' precision, computed once per sampling phase."""
        key = (id(layer), name)
        if key not in self._cast:
            up = layer.lora_B[name].weight * layer.scaling[name]
            self._cast[key] = layer.lora_A[name].weight.to(dtype).t(), up.to(dtype).t()
        return self._cast[key]

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample one batch, without gradients; adapters must not change within."""
        try:
            yield
        finally:
            self.routes = None
            self._cast.clear()

    @contextlib.contextmanager
    def only(self, adapter: str | None) -> Iterator[None]:
        """Route all rows through this adapter; None: the base alone."""
        before, self.adapter = self.adapter, adapter
        try:
            yield
        finally:
            self.adapter = before

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return the contexts of a checkpoint's forward pass and recomputation (``context_fn`` of
        ``torch.utils.checkpoint``), so that both use the calling thread's adapter.

        On a GPU, autograd recomputes in another thread.
        """
        return contextlib.nullcontext(), self.only(self.adapter)


def add_router(model: PreTrainedModel) -> Router | None:
    """Replace the forward pass of the model's LoRA layers, and return their common router.

    Returns None, and leaves all layers unchanged, if one is neither LoRA on an ordinary linear
    layer nor on a quantized one (DoRA, …).
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]
    if not all(_ordinary(layer) for layer in layers):
        return None
    router = Router(layers[0].active_adapters[0])
    for layer in layers:
        layer.router = router  # type: ignore[assignment]
        layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
    return router


def is_quantized(linear: torch.nn.Module) -> bool:
    """Return whether a linear layer is quantized, by bitsandbytes or torchao."""
    weight: Any = getattr(linear, "weight", None)
    return any(
        kind.__module__.partition(".")[0] in ("bitsandbytes", "torchao")
        for kind in (type(linear), type(weight))
    )


def _ordinary(layer: Any) -> bool:
    plain = type(layer) is Linear and type(layer.base_layer) is torch.nn.Linear
    if not (plain or is_quantized(layer.base_layer)):
        return False
    return not any(layer.use_dora.values()) and not any(layer.lora_bias.values())


def _forward(layer: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    router = layer.router
    base = layer.base_layer(x)
    name = router.adapter
    if layer.disable_adapters or name is None:
        return base
    width = base.shape[-1]
    if router.routes is not None:
        for owner, rows in router.routes:
            assert owner is not None, "the base alone never shares a batch with adapters"
            down, up = router.matrices(layer, owner, x.dtype)
            low = x[rows].reshape(-1, x.shape[-1]) @ down
            base[rows].view(-1, width).addmm_(low, up)
        return base
    down, up = layer.lora_A[name].weight.to(x.dtype), layer.lora_B[name].weight.to(x.dtype)
    low = F.linear(layer.lora_dropout[name](x), down) * layer.scaling[name]
    rows = base.view(-1, width)
    return torch.addmm(rows, low.view(-1, low.shape[-1]), up.t()).view(base.shape)
