"""Collective calls over torch.distributed; with one process they are the identity.

Each process grows trees for its shard of a step's tasks, and gradients are summed over processes.
Sums are weighted by actual counts, so that uneven shards are exact. With keyed sampling, the trees
do not depend on how tasks are divided.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from comlrl.errors import PeerFailed, UserError

T = TypeVar("T")
K = TypeVar("K")

PATIENCE = timedelta(hours=1)  # for rollouts of unequal length; a dead process is noticed at once
BUCKET = 1 << 26  # elements of a flat gradient: one for adapters, several for whole models


before_meeting: list[Callable[[], None]] = []  # called before every collective call


class LostPeer(RuntimeError):
    """A collective call failed because another process has ended."""


@dataclass(frozen=True)
class _GivenUp:
    code: int
    saves: bool


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main() -> bool:
    return rank() == 0


def start() -> None:
    """Join the process group of torchrun, if there is more than one process."""
    if world_size() == 1 or torch.distributed.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.device_count() >= local_world_size():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"  # objects travel over gloo, gradients over NCCL
    torch.distributed.init_process_group(backend, timeout=PATIENCE)


def check_gpus() -> None:
    """Raise UserError if this machine has GPUs, but fewer of them than processes."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_world_size():
        raise UserError(
            f"torchrun: --nproc_per_node {local_world_size()} is more than the {gpus} GPU(s) of "
            "this machine; start one process per GPU"
        )


def stop() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def all_gather(value: T) -> list[T]:
    """Gather each process's value, in rank order. Raises PeerFailed if a process has failed."""
    if world_size() == 1:
        return [value]
    parts = _gather(value)
    for part in parts:
        if isinstance(part, _GivenUp):
            raise PeerFailed(part.code, part.saves)
    return parts


def give_up(code: int, saves: bool = False) -> bool:
    """Tell the other processes, which wait in ``all_gather``, that this one ends with an error.

    ``saves``: as for PeerFailed. Returns whether this process should print the error: the lowest
    rank that gave up should. Not for errors in the middle of an update, where the others wait for
    gradients; let the process die there.
    """
    if world_size() == 1:
        return True
    parts = _gather(_GivenUp(code, saves))
    return rank() == next(r for r, part in enumerate(parts) if isinstance(part, _GivenUp))


def lost_peer(error: Exception) -> bool:
    """Return whether a collective call has failed because another process has ended.

    With sharded models, torch itself makes collective calls; with gloo, on CPUs, they raise a plain
    RuntimeError, which is not recognized.
    """
    return world_size() > 1 and isinstance(error, LostPeer | torch.distributed.DistError)


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Raise LostPeer for the RuntimeError by which gloo reports that a process has ended."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostPeer(str(error)) from error


def exchange(number: int) -> list[int]:
    """Return each process's number, in rank order."""
    numbers = [torch.empty(1, dtype=torch.int64) for _ in range(world_size())]
    with _collective():
        torch.distributed.all_gather(numbers, torch.tensor([number]))
    return [int(each) for each in numbers]


def _gather(value: Any) -> list[Any]:
    for prepare in before_meeting:
        prepare()
    parts: list[Any] = [None] * world_size()
    with _collective():
        torch.distributed.all_gather_object(parts, value)
    return parts


def from_main(make: Callable[[], T]) -> T:
    """Return the main process's result on every process; the others wait for it."""
    return all_gather(make() if is_main() else None)[0]  # type: ignore[return-value]


@dataclass(frozen=True)
class Deal:
    """An assignment of a list's items to processes; shards keep the list's order."""

    ranks: tuple[int, ...] = ()  # the process of each item

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this process's items."""
        return [item for item, r in zip(items, self.ranks, strict=True) if r == rank()]

    def gather(self, items: Sequence[T]) -> list[T]:
        """Gather all processes' shards, in the order of the whole list."""
        parts = all_gather(list(items))
        assert sum(map(len, parts)) == len(self.ranks), "shards of another deal"
        rest = [iter(part) for part in parts]
        return [next(rest[r]) for r in self.ranks]

    def positions(self, counts: Sequence[int]) -> tuple[list[int], int]:
        """Return the global positions of this process's items, and the number of all items.

        ``counts``: the number of items of each element of this process's shard. Batches that are
        chosen by position are then the same for any number of processes.
        """
        *starts, total = itertools.accumulate(self.gather(counts), initial=0)
        pairs = zip(self.shard(starts), counts, strict=True)
        return [at for start, count in pairs for at in range(start, start + count)], total


def deal(items: Sequence[T], cost: Callable[[T], int] | None = None) -> Deal:
    """Divide items by cost, which must be the same on all processes; None: all cost 1."""
    if cost is None or world_size() == 1:
        return Deal(balanced([1] * len(items), world_size()))
    return Deal(balanced([cost(item) for item in items], world_size()))


def shard(items: Sequence[T]) -> list[T]:
    """Return this process's part: every world_size-th item."""
    return deal(items).shard(items)


def total(value: float) -> float:
    """Sum a value over the processes."""
    return sum(all_gather(value))


def all_reduce_counts(values: Mapping[K, float]) -> dict[K, float]:
    """Sum values by key over the processes, in one exchange."""
    parts = all_gather(dict(values))
    return {name: sum(part[name] for part in parts) for name in values}


def add_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum gradients over the processes, in one flat call (whole models: a few).

    A parameter without a gradient on any process keeps None, so that optimizers skip it.
    """
    if world_size() > 1:
        for bucket in _buckets(parameters):
            _add(bucket)


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = []
    size = BUCKET
    for parameter in parameters:
        if size + parameter.numel() > BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel()
    return buckets


def _add(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum, in one all-reduce, the gradients and the number of processes that have each one."""
    device = parameters[0].device
    double = any(p.dtype == torch.float64 for p in parameters)
    dtype = torch.float64 if double else torch.float32
    have = [torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=device)]
    flat = torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(dtype)
            for p in parameters
        ]
        + have
    )
    for prepare in before_meeting:
        prepare()
    with _collective():
        torch.distributed.all_reduce(flat)
    counts = flat[-len(parameters) :].tolist()
    at = 0
    for parameter, count in zip(parameters, counts, strict=True):
        part = flat[at : at + parameter.numel()].view_as(parameter)
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        parameter.grad = part.to(dtype, copy=True) if count else None
        at += parameter.numel()


def in_sync(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether these tensors are bit-equal on all processes."""
    if world_size() == 1:
        return True
    import hashlib

    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return len(set(all_gather(digest.hexdigest()))) == 1


def balanced(costs: Sequence[int], size: int) -> tuple[int, ...]:
    """Assign each item to one of ``size`` processes, so that their total costs are similar.

    In order of decreasing cost, items go to the process with the least so far. Round-robin is used
    instead if its greatest total is not higher.
    """
    ranks, loads = [0] * len(costs), [0] * size
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        ranks[item] = loads.index(min(loads))
        loads[ranks[item]] += costs[item]
    if max(loads) < max(sum(costs[r::size]) for r in range(size)):
        return tuple(ranks)
    return tuple(i % size for i in range(len(costs)))
