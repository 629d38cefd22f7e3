"""Weights that do not change while sampling, laid out once as oneDNN's products read them.

A bfloat16 product on a CPU lays its weight out anew each time, which for few rows takes a third as
long as the product itself. The results are the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comlrl.models.fast.packed_attention import LARGE_BYTES

BYTES = 1 << 30  # of weights that are laid out a second time, at most
STEPS = 10  # decoding steps that save as much as laying out costs
MKLDNN: Any = torch.ops.mkldnn


def worth_it(weights: int, steps: int, like: Tensor) -> bool:
    """``weights``: their bytes; ``steps``: products of each with few rows."""
    fitting = LARGE_BYTES <= weights <= BYTES and steps > STEPS
    return fitting and like.device.type == "cpu" and like.dtype == torch.bfloat16 and available()


def available() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(MKLDNN, name) for name in names) and MKLDNN._is_mkldnn_bf16_supported()


def give_back() -> None:
    """Return to the system the memory that such copies have left: an update's threads have their
    own, and could not use it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have none
        trim(0)


class Linear:
    """W x + b; ``prepacked``: by a copy of W in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None, prepacked: bool) -> None:
        self.weight, self.bias, self.prepacked = weight, bias, prepacked
        if prepacked:
            self.weight = MKLDNN._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        if not self.prepacked:
            return F.linear(x, self.weight, self.bias)
        return MKLDNN._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """y + W x, rounded once; y may be written over."""
        if not self.prepacked:
            return y.addmm_(x, self.weight.t())
        return MKLDNN._linear_pointwise.binary(x, y, self.weight, None, "add")
