"""Models that do not fit on one GPU: decoder layers of a frozen base, sharded over processes.

torch's ``fully_shard`` holds 1/K of each layer's frozen weights in each of K processes and gathers
a layer only while it computes. Everything else is replicated: embeddings and head, which are used
outside the layers, and the adapters. Gradients, optimizers and checkpoints are therefore those of
``distributed.strategy: replicate``.

Gathering a layer needs all processes, but each has different work. Those with fewer passes make
additional ones of weight zero, over one token (``Passes``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from comlrl.errors import UserError
from comlrl.models.agent import Agent, lora_layers, modes, through
from comlrl.processes import distributed

# Kinds of passes, in the order in which they are made; other collective calls (``MEETING``) come
# last. READ_BETWEEN is a pass without gradients between a forward and its backward pass, and the
# only kind that a process waits for before a backward pass.
READ_BETWEEN, BACKWARD, LEARN, READ = range(4)
MEETING = 1 << 30


def check() -> None:
    """Raise UserError if models cannot be split."""
    from torch.distributed.fsdp import fully_shard

    if distributed.world_size() == 1:
        raise UserError(
            "distributed.strategy: 'fsdp' splits models over processes, and there is one; start "
            "with torchrun --nproc_per_node K, or set distributed.strategy=replicate"
        )
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise UserError(
            f"distributed.strategy: 'fsdp' with torch {torch.__version__}, which cannot leave "
            "adapters whole; install torch 2.7 or later, or set distributed.strategy=replicate"
        )


def shard(agents: Sequence[Agent]) -> None:
    """Split the frozen weights of every decoder layer of these agents' models, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(agents[0].device.type, (distributed.world_size(),))
    for agent in agents:
        model: Any = agent.model
        decoder = model.get_decoder()
        adapters = {p for name, p in decoder.named_parameters() if "lora_" in name}
        layers = _layers(decoder)
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
        for layer, before in zip(layers, [layers[0], *layers], strict=False):
            # By default, prefetching depends on the passes since the last backward pass.
            layer.set_modules_to_backward_prefetch([before])
        split = {p for layer in layers for p in layer.parameters()}
        fully_shard(decoder, mesh=mesh, ignored_params={*decoder.parameters()} - split | adapters)
        model.enable_input_require_grads()  # so that a backward pass goes through every layer
    Passes(agents)


def _layers(decoder: torch.nn.Module) -> list[Any]:
    """Return the decoder's blocks: its only list of modules."""
    lists = [m for m in decoder.children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) != 1:
        raise UserError(
            f"distributed.strategy: 'fsdp' does not know the layers of {type(decoder).__name__}; "
            "set distributed.strategy=replicate"
        )
    return list(lists[0])


class Passes:
    """The order of passes through sharded models, which must be the same in all processes.

    Before a pass, and before any other collective call, the processes exchange what each does next.
    All processes then make the first of these, in the order above; those that did not plan it use
    one token, without adapters. Numbers of micro-batches may therefore differ, and between two
    collective calls each process may make any passes.
    """

    def __init__(self, agents: Sequence[Agent]) -> None:
        """Register hooks on the models. ``agents``: one per model."""
        self.agents = agents
        self.idle = False  # in a pass of weight zero
        self.outstanding = 0  # forward passes with gradients that await their backward pass
        # Per model: input and output of passes of weight zero that await their backward pass.
        self.begun: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in agents]
        for number, agent in enumerate(agents):
            decoder: Any = agent.model.get_decoder()  # type: ignore[operator]
            decoder.register_forward_pre_hook(lambda *_, n=number: self._before(n))
            decoder.register_forward_hook(lambda *a, n=number: self._after(n, a[-1]))
        distributed.before_meeting[:] = [lambda: self.meet(MEETING)]

    def meet(self, mine: int) -> None:
        """Make passes of weight zero until what this process does next is first in the order."""
        while not self.idle:
            first = min(distributed.exchange(mine))
            if first == mine:
                break
            self.idle = True
            try:
                self._pass(*divmod(first, len(self.agents)))
            finally:
                self.idle = False
        if mine == MEETING:
            for begun in self.begun:
                begun.clear()

    def _before(self, number: int) -> None:
        without = READ_BETWEEN if self.outstanding else READ
        self._meet(LEARN if torch.is_grad_enabled() else without, number)

    def _meet(self, kind: int, number: int) -> None:
        self.meet(kind * len(self.agents) + number)

    def _after(self, number: int, output: Any) -> None:
        hidden = output.last_hidden_state
        if hidden.requires_grad and not self.idle:
            self.outstanding += 1
            hidden.register_hook(lambda _: self._back(number))

    def _back(self, number: int) -> None:
        self._meet(BACKWARD, number)
        self.outstanding -= 1

    def _pass(self, kind: int, number: int) -> None:
        """Make a pass of weight zero."""
        agent = self.agents[number]
        routed = through(lora_layers(agent.model), None)
        with routed if agent.router is None else agent.router.only(None):
            if kind == BACKWARD:
                first, last = self.begun[number].pop()
                torch.autograd.grad(last, first, torch.zeros_like(last))
                return
            width, learns = agent.model.config.hidden_size, kind == LEARN
            like: Any = agent.model.get_input_embeddings().weight  # type: ignore[union-attr]
            first = torch.zeros(
                1, 1, width, dtype=like.dtype, device=like.device, requires_grad=learns
            )
            with modes(agent.switches, learns), torch.set_grad_enabled(learns):
                last = agent.hidden(inputs_embeds=first, use_cache=False)
            if learns:
                self.begun[number].append((first, last))
