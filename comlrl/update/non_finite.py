"""Saves the batch whose loss or gradient is not finite, and explains the error."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from comlrl.errors import NonFiniteError
from comlrl.types import SamplingSupport, TokenBatch


def explanation(error: NonFiniteError, step: int, folder: Path) -> str:
    """Save the error's batch, and say where the value occurred, where the batch is and what may
    help."""
    who = "" if error.agent is None else f"agent {error.agent}, "
    where = "" if error.batch is None else f"; its batch is in {save_batch(error.batch, folder)}"
    return (
        f"{who}training step {step}: {error}{where}. "
        "A lower learning_rate, or torch_dtype: float32, may help"
    )


def save_batch(batch: TokenBatch, folder: Path) -> Path:
    """Save the batch that produced a non-finite value; return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "non_finite_batch.safetensors"
    save_file(_tensors(batch), str(path))
    return path


def _tensors(values: TokenBatch | SamplingSupport) -> dict[str, torch.Tensor]:
    """Return the tensors by field name, including those of the sampling support, if any."""
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, SamplingSupport):
            tensors |= _tensors(value)
        elif value is not None:
            tensors[field.name] = value.contiguous()
    return tensors
