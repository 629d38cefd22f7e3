"""Accumulates gradients of a loss over rows, in micro-batches that fit into memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from comlrl.errors import NonFiniteError, notice
from comlrl.models.agent import Agent
from comlrl.models.fast.packed_attention import SHAPE_STEP, rounded
from comlrl.models.logprobs import packable
from comlrl.models.rows import (
    common_beginning,
    computed,
    pack,
    row_groups,
    split_rows,
    unpacked,
)
from comlrl.processes.statistics import Sums
from comlrl.types import Row, TokenBatch
from comlrl.update.worker_threads import run_parallel, worker_threads

S = TypeVar("S")
Loss = Callable[[TokenBatch], tuple[torch.Tensor, Sums]]

MICRO_BATCH_TOKENS = {"cpu": 3072, "cuda": 8192}  # larger batches are hardly faster per token
SHARE_STEP = SHAPE_STEP  # tokens; a thread's share is a multiple, as fewer are not worth a thread
ALONE = {"cpu": 2, "cuda": 1}  # a row in a batch alone may have this many times the tokens
GRADIENT_SUM_BYTES = 2 << 30  # limit on the gradient buffers of an agent's worker threads together
# Activations of one micro-batch, before the head. On a GPU the limit is a quarter of the memory
# beside the weights, regardless of other use, so that every run has the same batches. The number
# here is for 80 GiB, in a dry run.
ACTIVATION_BYTES = {"cpu": 1 << 30, "cuda": 20 << 30}


def micro_batches(
    agent: Agent, rows: Sequence[Row], max_tokens: int | None = None, concurrent: bool = False
) -> Iterator[TokenBatch]:
    """Pack rows into batches of similar size, as few as fit the device's token budget. With
    ``concurrent`` their number is about a multiple of the CPU's cores. Batches depend only on the
    rows and the budget.

    After running out of memory, the agent's batches keep their reduced size.
    """
    budget = max_tokens or token_budget(agent)
    common = common_beginning(rows) if _shared(agent) else 0
    total = sum(_sizes(agent, rows)) - common * max(0, len(rows) - 1)
    cores = worker_threads(agent.device) if concurrent else 1
    fewest = cores * math.ceil(total / (budget * cores))
    share = rounded(math.ceil(total / max(1, fewest)), SHARE_STEP)
    groups = _groups(agent, rows, min(budget, share))
    while len(groups) > fewest and share < budget:  # rows do not fill them
        share += SHARE_STEP
        groups = _groups(agent, rows, min(budget, share))
    for group in groups:
        yield pack(group, agent.tokenizer.pad_token_id)


def _groups(agent: Agent, rows: Sequence[Row], most: int) -> list[list[Row]]:
    """Group rows into batches of at most ``most`` tokens, or of one completion. A single row may
    have more (``ALONE``), because splitting it would compute its prompt again."""
    shared = _shared(agent)
    binding = most == token_budget(agent) and not agent.micro_batch_tokens
    alone = ALONE[_kind(agent)] * most if binding else most
    fitting = split_rows(rows, alone, shared) if packable(agent) else unpacked(rows)
    common = common_beginning(fitting) if shared else 0
    return list(row_groups(fitting, most, shared, common))


def _shared(agent: Agent) -> bool:
    """Return whether updates compute prefixes that siblings share only once."""
    return agent.fast is not None and agent.fast.learning


def _sizes(agent: Agent, rows: Sequence[Row]) -> list[int]:
    """Count the tokens of each row that use the agent's memory."""
    return [computed(row) if _shared(agent) else row.length for row in rows]


def token_budget(agent: Agent) -> int:
    """Return the most tokens of a micro-batch. Checkpoints store it, since float sums depend on
    it."""
    if agent.micro_batch_tokens:
        return agent.micro_batch_tokens
    kind, memory = _kind(agent), None
    if agent.device.type == "cuda":
        memory = torch.cuda.get_device_properties(agent.device).total_memory
        if not agent.sharded:
            memory -= sum(parameter.nbytes for parameter in agent.model.parameters())
    return tokens_at_once(kind, _activation_bytes(agent), memory)


def _kind(agent: Agent) -> str:
    return agent.device.type if agent.device.type in MICRO_BATCH_TOKENS else "cuda"


def tokens_at_once(kind: str, activations: float, memory: int | None = None) -> int:
    """Return the most tokens of a micro-batch on this kind of device. ``activations``: bytes
    stored for each token; ``memory``: bytes of a GPU beside the weights."""
    most = ACTIVATION_BYTES[kind] if memory is None else memory // 4
    return max(256, min(MICRO_BATCH_TOKENS[kind], int(most // activations)))


def _activation_bytes(agent: Agent) -> int:
    """Return the bytes stored for each token until the backward pass."""
    config: Any = agent.model.config
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    return activations(config.num_hidden_layers, width, inner) * int(agent.model.dtype.itemsize)


def activations(layers: int, width: int, inner: int) -> int:
    """Estimate how many numbers are stored for each token until the backward pass: in each layer
    about 8 vectors of the hidden width and 3 of the intermediate width."""
    return layers * (8 * width + 3 * inner)


def accumulate(
    agent: Agent,
    rows: Sequence[Row],
    loss: Loss,
    sums: Sums,
    *,
    parameters: Sequence[torch.nn.Parameter] | None = None,
    concurrent: bool = False,
) -> None:
    """Accumulate gradients of ``loss`` over micro-batches of packed rows, and its statistics in
    ``sums``.

    ``loss``: micro-batch → (its part of the loss, sums for the log). The loss must be a sum over
    completions, so that the result does not depend on the split. If memory runs out, gradients are
    discarded and computed again in micro-batches of half the size, down to one completion.
    ``parameters``: all that the loss trains, if more than the agent's. ``concurrent``:
    micro-batches may run in parallel, as ``loss`` changes no state except the adapter router's.
    Raises NonFiniteError, with agent and batch, if a loss or a gradient is not finite.
    """
    trained = list(agent.parameters() if parameters is None else parameters)
    gradients_before = [None if p.grad is None else p.grad.clone() for p in trained]
    budget = token_budget(agent)
    while True:
        batches = list(micro_batches(agent, rows, budget, concurrent))
        count = _thread_count(agent, batches, concurrent, trained)
        try:
            with agent.learning():
                if count < 2:
                    done_B = [_backward(batch, loss, trained) for batch in batches]
                else:
                    done_B = _backward_in_threads(agent, batches, loss, trained, count)
            _check_finite(batches, done_B)
            break
        except NonFiniteError as error:
            error.agent = agent.index
            raise
        except (MemoryError, torch.OutOfMemoryError):
            pass  # smaller micro-batches, below
        if agent.sharded:  # the other processes are still in the pass that failed here
            raise MemoryError("out of memory in the update; start more processes")
        smallest = max(_sizes(agent, unpacked(rows)))
        if budget <= smallest:
            raise MemoryError(
                f"out of memory in the update, with one completion of {smallest} tokens at a "
                "time; lower agent_model.max_length or max_new_tokens, or set "
                "agent_model.gradient_checkpointing=true"
            )
        budget = agent.micro_batch_tokens = max(budget // 2, smallest)
        for parameter, gradient in zip(trained, gradients_before, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        notice(
            f"out of memory: agent {agent.index}'s micro-batches are limited to {budget} tokens "
            "from here"
        )
    for done in done_B:
        sums.absorb(done.sums)


@dataclass(frozen=True, slots=True)
class Done:
    """Results of a micro-batch's backward pass, not yet copied to the host."""

    sums: Sums
    loss: torch.Tensor
    norm: torch.Tensor  # of the gradients summed so far


def _backward(
    batch: TokenBatch,
    loss: Loss,
    trained: Sequence[torch.nn.Parameter],
) -> Done:
    """Accumulate a micro-batch's gradients in the parameters' ``grad``."""
    value, sums = loss(batch)
    value.backward()
    return Done(sums, value.detach(), _gradient_norm(trained))


def _gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def _backward_in_threads(
    agent: Agent,
    batches: Sequence[TokenBatch],
    loss: Loss,
    trained: Sequence[torch.nn.Parameter],
    count: int,
) -> list[Done]:
    """Run ``_backward`` on each batch. Gradients are summed within each worker thread, then
    thread by thread, so that the sum does not depend on which thread was faster."""

    def work(share: Sequence[TokenBatch]) -> tuple[list[torch.Tensor | None], list[Done]]:
        sums: list[torch.Tensor | None] = [None] * len(trained)
        done = []
        for batch in share:
            value, log = loss(batch)
            batch_gradients = torch.autograd.grad(value, trained, allow_unused=True)
            sums = [_plus(a, b) for a, b in zip(sums, batch_gradients, strict=True)]
            gradients = [gradient for gradient in sums if gradient is not None]
            done.append(Done(log, value.detach(), torch.nn.utils.get_total_norm(gradients)))
        return sums, done

    done = _in_threads(agent, batches, work, count)
    for sums, _ in done:
        for parameter, gradient in zip(trained, sums, strict=True):
            parameter.grad = _plus(parameter.grad, gradient)
    return [done[i % count][1][i // count] for i in range(len(batches))]


def measure_all(
    agent: Agent,
    rows: Sequence[Row],
    measure: Callable[[TokenBatch], None],
    concurrent: bool = False,
) -> None:
    """Call ``measure``, without gradients, on the micro-batches of ``accumulate``; values are
    bitwise equal to those there. With ``concurrent`` several threads may call ``measure``."""

    def work(share: Sequence[TokenBatch]) -> None:
        with torch.no_grad():  # grad mode is thread-local
            for batch in share:
                measure(batch)

    batches = list(micro_batches(agent, rows, concurrent=concurrent))
    _in_threads(agent, batches, work, _thread_count(agent, batches, concurrent))


def _thread_count(
    agent: Agent,
    batches: Sequence[TokenBatch],
    concurrent: bool,
    trained: Sequence[torch.nn.Parameter] = (),
) -> int:
    """Return the number of worker threads for the batches; each sums the gradients of ``trained``
    in separate buffers."""
    if not concurrent:
        return 1
    gradient = 4 * sum(parameter.numel() for parameter in trained)  # bytes, as sums are float32
    affordable = GRADIENT_SUM_BYTES // gradient if gradient else len(batches)
    return max(1, min(worker_threads(agent.device), len(batches), affordable))


def _in_threads(
    agent: Agent,
    batches: Sequence[TokenBatch],
    work: Callable[[Sequence[TokenBatch]], S],
    count: int,
) -> list[S]:
    """Run ``count`` worker threads, each on every ``count``-th batch, with the caller's adapter."""
    router = agent.router
    adapter = None if router is None else router.adapter

    def run(start: int) -> S:
        with contextlib.nullcontext() if router is None else router.only(adapter):
            return work(batches[start::count])

    return run_parallel([partial(run, start) for start in range(count)], agent.device)


def _plus(sum_: torch.Tensor | None, term: torch.Tensor | None) -> torch.Tensor | None:
    if term is None:
        return sum_
    return term.clone() if sum_ is None else sum_.add_(term)


def _check_finite(batches: Sequence[TokenBatch], done_B: Sequence[Done]) -> None:
    """Raise NonFiniteError with the first batch whose loss or gradient is not finite."""
    if not done_B:
        return
    device = done_B[0].loss.device
    values = [x.double().to(device) for done in done_B for x in (done.loss, done.norm)]
    numbers = torch.stack(values).tolist()  # the update's only synchronization with the device
    for at, number in enumerate(numbers):
        if not math.isfinite(number):
            what = "the gradient's norm" if at % 2 else "the loss"
            raise NonFiniteError(f"{what} is {number}", batches[at // 2])
