"""A decoding step's small operations by a C library that is compiled at first use and kept.

Between its products a layer runs some fifty operations on a few thousand numbers each, most of
whose time is the call. Here they are four passes, and keys and values stay in bfloat16. Without a
C compiler, or for weights that are small or of another precision, torch's operations serve.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from comlrl.models.fast.packed_attention import LARGE_BYTES, rounded
from comlrl.models.fast.prefix_cache import SharedPrefixCache

if TYPE_CHECKING:
    from comlrl.models.fast.decoder import FastDecoder, Routes

SOURCE = Path(__file__).with_name("decoding_step.c")
FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-freciprocal-math",
]
BLOCK = 32  # as in the source


@functools.cache
def library(width: int, group: int) -> ctypes.CDLL | None:
    """For heads of this width, ``group`` of which share a key head; None: it cannot be had."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or width % BLOCK or platform.machine() != "x86_64":
        return None
    command = [compiler, *FLAGS, f"-DWIDTH={width}", f"-DGROUP={group}"]
    known = [*command, SOURCE.read_text(), _processor()]
    name = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comlrl"
        path = folder / f"decoding_step_{name}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as building:
                made = Path(building) / path.name
                subprocess.run([*command, str(SOURCE), "-o", str(made), "-lm"],
                               check=True, capture_output=True, timeout=60)  # fmt: skip
                made.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # no home, among others
        return None


def _processor() -> str:
    """What the compiler's ``native`` depends on."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next((line for line in lines if line.startswith("flags")), platform.processor())


def serves(fast: FastDecoder) -> bool:
    """Whether this decoder's steps go this way on this machine."""
    weights = (fast.embedding.weight, fast.norm.weight, fast.layers[0].qkv.linears[0].weight)
    usual = all(w.device.type == "cpu" and w.dtype == torch.bfloat16 for w in weights)
    large = fast.bytes >= LARGE_BYTES and fast.inner % BLOCK == 0
    return usual and large and library(fast.width, fast.heads // fast.kv_heads) is not None


class NativeCache(SharedPrefixCache):
    """Keys and values in bfloat16 as the library reads them: keys (…, width, tokens), with room
    for multiples of its blocks."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Of prompts; a step's tokens are stored by ``NativeStep``."""
        assert self.prefilling
        P, heads, L, width = key.shape
        keys, values = self._room(P, heads, width, L)
        keys[..., :L] = key.transpose(-1, -2)
        values[:, :, :L] = value
        self.prefix.append((keys, values))
        return key, value

    def _room(self, rows: int, heads: int, width: int, tokens: int) -> tuple[Tensor, Tensor]:
        room, device = rounded(tokens, BLOCK), self.lengths_P.device
        return (
            torch.empty(rows, heads, width, room, dtype=torch.bfloat16, device=device),
            torch.empty(rows, heads, room, width, dtype=torch.bfloat16, device=device),
        )

    def of_rows(self, layer: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Where a layer keeps the rows' own."""
        if len(self.own) <= layer:
            self.own.append(self._room(len(self.prompt_of_R), heads, width, self.max_new_tokens))
        return self.own[layer]

    def _kept(self, own: Tensor, rows: Tensor) -> Tensor:
        return own.index_select(0, rows)

    def _place(self, prompt_of_R: Tensor) -> None:
        super()._place(prompt_of_R)
        self.place_R = (
            self.slot_R // self.siblings
        )  # of each row's prompt among those that are left
        self.known_P = (~self.padding_PL).sum(1)


class NativeStep:
    """Hidden states of one new token a row, as ``FastDecoder.hidden`` finds them."""

    def __init__(self, fast: FastDecoder, cache: NativeCache) -> None:
        found = library(fast.width, fast.heads // fast.kv_heads)
        assert found is not None
        self.fast, self.cache, self.library = fast, cache, found

    def __call__(self, ids_R: Tensor, cos_sin: tuple[Tensor, Tensor], routes: Routes) -> Tensor:
        fast = self.fast
        cos, sin = (part.contiguous() for part in cos_sin)
        x = fast.embedding(ids_R)
        y: Tensor | None = None
        for index, layer in enumerate(fast.layers):
            y = fast.product(layer.qkv, self._norm(x, y, layer.input_norm), routes)
            if layer.head_norms is not None:
                y = layer.head_norms(y.view(len(x), -1, fast.width))
            y = fast.product(layer.out, self._attend(index, y, cos, sin), routes)
            y = fast.product(layer.gate_up, self._norm(x, y, layer.post_attention_norm), routes)
            y = fast.product(layer.down, self._gated(y), routes)
        return self._norm(x, y, fast.norm)

    def _norm(self, x: Tensor, added: Tensor | None, norm: Any) -> Tensor:
        """Of x + added, which x becomes."""
        out = torch.empty_like(x)
        self.library.rms_norm(
            _at(x), None if added is None else _at(added), _at(norm.weight),
            ctypes.c_float(norm.variance_epsilon), _at(out), *map(ctypes.c_long, x.shape),
        )  # fmt: skip
        return out

    def _gated(self, both: Tensor) -> Tensor:
        rows, width = len(both), both.shape[1] // 2
        out = both.new_empty(rows, width)
        self.library.swiglu(_at(both), _at(out), ctypes.c_long(rows), ctypes.c_long(width))
        return out

    def _attend(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        fast, cache, rows = self.fast, self.cache, len(qkv)
        prompts, own = cache.prefix[layer], cache.of_rows(layer, fast.kv_heads, fast.width)
        out = qkv.new_empty(rows, fast.heads * fast.width)
        places = (prompts[1].shape[2], own[1].shape[2], cache.step)
        self.library.attend(
            _at(qkv), _at(cos), _at(sin), *map(_at, prompts), _at(cache.place_R),
            _at(cache.known_P), *map(_at, own), _at(out),
            *map(ctypes.c_long, (rows, fast.kv_heads, *places)), ctypes.c_float(fast.scaling),
        )  # fmt: skip
        return out


def _at(x: Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous()
    return ctypes.c_void_p(x.data_ptr())
