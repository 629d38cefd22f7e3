"""How large a model is, from what is at hand without loading its weights."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl.config.sections import LoraSection
from comlrl.models.packed import is_packed, source_of
from trainers.launch.wiring.hub import model_folder, tensor_shapes

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}  # of a weight
EXCLUDED = re.compile(r"embed|wte|wpe|lm_head|score")  # never among LoRA's "all-linear"


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a decoder."""

    layers: int
    width: int
    inner: int  # of the feed-forward part
    heads: int  # numbers of all query heads of a token
    kv: int  # of all key heads
    vocabulary: int
    gated: bool = True  # three matrices in the feed-forward part, not two
    tied: bool = True  # the embedding is the language-model head too

    @property
    def linear(self) -> int:
        """Weights that every token is multiplied with, without the language-model head."""
        attention = 2 * self.width * (self.heads + self.kv)
        return self.layers * (attention + (3 if self.gated else 2) * self.width * self.inner)

    @property
    def head(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """Of the whole model, without norms and biases."""
        return self.linear + self.head * (1 if self.tied else 2)

    @property
    def left(self) -> int:
        """Numbers that a token leaves for the backward pass."""
        from comlrl.update.accumulate import activations

        return activations(self.layers, self.width, self.inner)

    @property
    def cache(self) -> int:
        """Numbers that a token has in the key/value cache."""
        return 2 * self.layers * self.kv

    def adapter(self, lora: LoraSection) -> int | None:
        """Parameters of one LoRA adapter; None: of modules whose sizes are not known."""
        query, key = self.width + self.heads, self.width + self.kv  # inputs and outputs
        up = self.width + self.inner
        known = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}
        known |= {"up_proj": up, "down_proj": up} | ({"gate_proj": up} if self.gated else {})
        names = known if lora.target_modules == "all-linear" else lora.target_modules
        if not known.keys() >= set(names):
            return None
        return lora.r * self.layers * sum(known[name] for name in names)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's size; None: unknown."""

    parameters: int | None
    source: str  # how that is known
    dims: Dims | None
    shapes: Mapping[str, Sequence[int]]  # of its tensors, where its weights are at hand

    @property
    def cache(self) -> int | None:
        """Numbers in the key/value cache for each token."""
        keys = [shape[0] for n, shape in self.shapes.items() if n.endswith("k_proj.weight")]
        if keys:
            return 2 * sum(keys)
        return None if self.dims is None else self.dims.cache

    def adapter(self, lora: LoraSection) -> int | None:
        """Parameters of one agent's LoRA adapter."""
        linear = [s for n, s in self.shapes.items() if len(s) == 2 and _has_adapter(n, lora)]
        if linear:
            return lora.r * sum(map(sum, linear))
        return None if self.dims is None else self.dims.adapter(lora)


def model_size(name: str) -> ModelSize:
    """From the header of local or cached weights and ``config.json``, else from a size such as
    ``3B`` in the name."""
    shapes, settings = _packed(name) if is_packed(name) else _at_hand(name)
    dims = _dims(settings)
    if shapes:
        counted = sum(math.prod(shape) for shape in shapes.values())
        return ModelSize(counted, "counted in its weights' header", dims, shapes)
    sizes = re.findall(r"(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])", name)
    if sizes:
        parameters = int(float(sizes[-1][0]) * (1e9 if sizes[-1][1] in "Bb" else 1e6))
        return ModelSize(parameters, "from its name", dims, {})
    if dims is not None:
        return ModelSize(dims.parameters, "from its config.json", dims, {})
    return ModelSize(None, "unknown: not at hand, and its name gives no size", None, {})


def _has_adapter(name: str, lora: LoraSection) -> bool:
    if isinstance(lora.target_modules, str):
        return not EXCLUDED.search(name)
    return name.split(".")[-2] in lora.target_modules


def _at_hand(name: str) -> tuple[Mapping[str, Sequence[int]], Mapping[str, Any]]:
    """A model's shapes and ``config.json``, empty where they are not here."""
    folder = model_folder(name)
    file = None if folder is None else folder / "config.json"
    there = file is not None and file.is_file()
    settings = json.loads(file.read_text(encoding="utf-8")) if file and there else {}
    return tensor_shapes(folder), settings


@functools.cache
def _packed(name: str) -> tuple[Mapping[str, Sequence[int]], Mapping[str, Any]]:
    """A ``.gguf``'s shapes, and what would be its ``config.json``, without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, file = source_of(name)
    settings = AutoConfig.from_pretrained(folder, **file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    return {n: tuple(p.shape) for n, p in model.named_parameters()}, settings.to_dict()


def _dims(found: Mapping[str, Any]) -> Dims | None:
    """From what a ``config.json`` holds; None where it has no sizes as known here."""
    width = found.get("hidden_size") or found.get("n_embd")
    layers = found.get("num_hidden_layers") or found.get("n_layer")
    heads = found.get("num_attention_heads") or found.get("n_head")
    if not (width and layers and heads and found.get("vocab_size")):
        return None
    each = found.get("head_dim") or width // heads
    kv = found.get("num_key_value_heads") or heads
    given = found.get("intermediate_size")
    tied = bool(found.get("tie_word_embeddings", True))
    return Dims(
        layers=layers,
        width=width,
        inner=given or 4 * width,
        gated=bool(given),
        heads=heads * each,
        kv=kv * each,
        vocabulary=found["vocab_size"],
        tied=tied,
    )
