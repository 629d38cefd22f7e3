"""The seam to several processes; with one process every function is the identity.

Each process grows trees for its share of a step's tasks and adds its gradients; sums are weighted
by real counts, so that uneven shares are exact. Keyed sampling makes the trees the same however
they are shared out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def start() -> None:
    """Join the process group that torchrun announces; alone, nothing happens."""
    if world_size() > 1 and not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group(backend)


def stop() -> None:
    if world_size() > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def share(items: Sequence[T]) -> list[T]:
    """This process's part: every world_size-th item."""
    return list(items[rank() :: world_size()])


def gather(items: Sequence[T]) -> list[T]:
    """All processes' shares, put back in the order that ``share`` took them from."""
    parts = everyone(list(items))
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def everyone(value: T) -> list[T]:
    """Each process's value, in rank order."""
    if world_size() == 1:
        return [value]
    parts: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(parts, value)
    return parts


def total(value: float) -> float:
    """Sum over the processes."""
    return sum(everyone(value))


def add_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum gradients over the processes, in one flat call."""
    if world_size() == 1:
        return
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in parameters]
    )
    torch.distributed.all_reduce(flat)
    at = 0
    for parameter in parameters:
        part = flat[at : at + parameter.numel()].view_as(parameter)
        parameter.grad = part.to(parameter.dtype).clone()
        at += parameter.numel()


def in_sync(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether these weights are bit-equal on all processes."""
    if world_size() == 1:
        return True
    import hashlib

    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return len(set(everyone(digest.hexdigest()))) == 1
