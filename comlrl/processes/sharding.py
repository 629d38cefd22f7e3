"""Models that do not fit one GPU: every decoder layer is split over the processes.

torch's ``fully_shard`` holds 1/K of each layer's weights, gradients and moments in each of K
processes and gathers a layer only while it computes. Its collective calls must come in the same
order everywhere, so that all processes do the same work in lock-step: the same trees (sampling is
keyed), the same batches, the same updates. Memory is split, work is not; only the sandbox's is.
Embeddings and the language-model head, which are looked at outside the layers, stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from comlrl.errors import UserError
from comlrl.processes import distributed


def check(fits_reward_model: bool) -> None:
    """Raise UserError if a run cannot be sharded."""
    if distributed.world_size() == 1:
        raise UserError(
            "distributed.strategy: 'fsdp' splits models over processes, and there is one; start "
            "with torchrun --nproc_per_node K, or set distributed.strategy=replicate"
        )
    if fits_reward_model:
        raise UserError(
            "distributed.strategy: 'fsdp' is not made for marlhf, whose reward model is trained "
            "whole; set distributed.strategy=replicate"
        )


def shard(models: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Split every decoder layer of these models over the processes, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    for model in models:
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def _layers(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return the decoder's blocks: its only list of modules."""
    decoder = model.get_decoder()  # type: ignore[operator]
    lists = [m for m in decoder.children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) != 1:
        raise UserError(
            f"distributed.strategy: 'fsdp' does not know the layers of {type(model).__name__}; set "
            "distributed.strategy=replicate"
        )
    return list(lists[0])


def is_split(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor, whose import costs every run half a second."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; a collective call for one that is split."""
    return tensor.full_tensor() if is_split(tensor) else tensor  # type: ignore[attr-defined]


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as checkpoints hold it: full, and off the GPU if it was split."""
    return full_tensor(tensor).cpu() if is_split(tensor) else tensor


def like(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Return a full value, split as ``target`` is; every process holds the same value."""
    if not is_split(target):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of all gradients, split ones and full ones."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    split = [g for g in gradients if is_split(g)]
    norm = torch.nn.utils.get_total_norm([g for g in gradients if not is_split(g)])
    if not split:
        return norm
    rest = full_tensor(torch.nn.utils.get_total_norm(split))
    return torch.hypot(norm.to(rest), rest)
