"""The size of a model, without loading its weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comlrl.config.sections import LoraSection
from comlrl.errors import UserError
from comlrl.trainers.launch.wiring.hub import model_folder

if TYPE_CHECKING:
    import torch

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}  # per weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model's size. Fields that are None or empty are unknown."""

    parameters: int | None
    source: str  # where the size comes from
    layers: frozenset[str] = frozenset()  # names of the modules that hold weights
    linear: Mapping[str, int] | None = None  # inputs + outputs of linear layers, except the head
    nonlinear: frozenset[str] = frozenset()  # embeddings and norms
    cache: int | None = None  # numbers per token in the key/value cache
    left: int | None = None  # numbers per token stored for the backward pass

    def adapter(self, lora: LoraSection) -> int | None:
        """Return the parameters of one agent's LoRA adapter; None: unknown."""
        if self.linear is None:
            return None
        wanted = lora.target_modules
        if wanted == "all-linear":
            return lora.r * sum(self.linear.values())
        return lora.r * sum(size for name, size in self.linear.items() if is_target(name, wanted))


def is_target(layer: str, wanted: str | list[str]) -> bool:
    """Return whether ``lora.target_modules`` (a pattern, or names) matches a layer, as in PEFT.
    Raises UserError for a malformed pattern."""
    if isinstance(wanted, str):
        try:
            return re.fullmatch(wanted, layer) is not None
        except re.error as error:
            raise UserError(
                f"lora.target_modules: '{wanted}' is not a pattern ({error}); use a list of "
                "layers, or a regular expression"
            ) from error
    return any(layer == name or layer.endswith(f".{name}") for name in wanted)


def model_size(name: str) -> ModelSize:
    """Return the size of the model that ``config.json`` builds on the meta device; without that
    file, the number of parameters from a size such as ``3B`` in the name."""
    folder = model_folder(name)
    size = None if folder is None else _built(str(folder))
    if size is not None:
        return size
    sizes = re.findall(r"(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])", name)
    if sizes:
        parameters = int(float(sizes[-1][0]) * (1e9 if sizes[-1][1] in "Bb" else 1e6))
        return ModelSize(parameters=parameters, source="from its name")
    return ModelSize(
        parameters=None, source="unknown: not available locally, and its name contains no size"
    )


@functools.cache
def _built(folder: str) -> ModelSize | None:
    """Return the size of a folder's model; None where transformers cannot build it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    from comlrl.update.accumulate import activations

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # transformers raises many types; a run reports it
        return None
    head = model.get_output_embeddings()
    sizes = config.get_text_config()
    width, heads = sizes.hidden_size, sizes.num_attention_heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    head_dim = getattr(sizes, "head_dim", None) or width // heads
    inner = getattr(sizes, "intermediate_size", None) or 4 * width
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        source="counted in its layers",
        layers=frozenset(name.rpartition(".")[0] for name, _ in model.named_parameters()),
        linear={
            name: sum(module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        },
        nonlinear=frozenset(
            name for name, module in model.named_modules() if _is_nonlinear(module)
        ),
        cache=2 * sizes.num_hidden_layers * kv_heads * head_dim,
        left=activations(sizes.num_hidden_layers, width, inner),
    )


def _is_nonlinear(module: torch.nn.Module) -> bool:
    """Return whether a module is an embedding, or has only vectors as weights, like a norm."""
    import torch

    sizes = [parameter.ndim for parameter in module.parameters(recurse=False)]
    return isinstance(module, torch.nn.Embedding) or (bool(sizes) and max(sizes) == 1)
