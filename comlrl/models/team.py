"""A team of agents: LoRA adapters on one shared frozen base, or separate models.

PEFT has one active adapter per model, so a whole phase (a generation call, a backward pass) runs
inside ``Team.acting(agent)`` or ``Team.reference(agent)``; adapters are not switched per sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel

from comlrl.models.agent import REFERENCE, Agent, Reference, Untrained, lora_layers, through
from comlrl.models.fast.lora_routing import Router
from comlrl.processes import distributed

GRADIENTS_AT_ONCE = 256 << 20  # bytes


class Team:
    """The models of N agents, in the order of their roles: one shared base or several models."""

    def __init__(
        self,
        agents: Sequence[Agent],
        *,
        shared_base: bool,
        begun_elsewhere: bool = False,
    ) -> None:
        self.agents = tuple(agents)
        self.shared_base = shared_base  # one model, an adapter for each agent
        # Initial weights come from ``init_from``, so checkpoints include the reference.
        self.begun_elsewhere = begun_elsewhere

    def __len__(self) -> int:
        return len(self.agents)

    def actor(self, index: int) -> Agent:
        """Return the agent that acts for an index: the agent itself, or the shared policy."""
        return self.agents[0 if len(self.agents) == 1 else index]

    @property
    def trained(self) -> tuple[int, ...]:
        """The indices of the agents that are trained; the others act with fixed weights."""
        return tuple(agent.index for agent in self.agents if agent.trained)

    @property
    def device(self) -> torch.device:
        """The device of the first agent."""
        return self.agents[0].device

    @property
    def router(self) -> Router | None:
        """The router of the base that all agents share, if it has one."""
        return self.agents[0].router if self.shared_base else None

    @property
    def run_parallel(self) -> bool:
        """Return whether agents may be updated in parallel, each in its own thread.

        They may if they share no state and their gradients together need little memory.
        """
        trained = [p for agent in self.agents for p in agent.parameters()]
        if sum(p.numel() * max(4, p.itemsize) for p in trained) > GRADIENTS_AT_ONCE:  # float32
            return False
        switched = any(agent.switches for agent in self.agents)  # of a model, not of a thread
        apart = self.router is not None or not self.shared_base
        # Without a router, the reference policy switches the adapters of all threads.
        apart = apart and all(
            agent.peft is None or agent.router is not None for agent in self.agents
        )
        return apart and not switched and not self.agents[0].sharded

    def split(self) -> None:
        """Split every decoder layer over the processes, in place (``models/sharding.py``).

        A layer is then complete only within its passes, so the fast decoder cannot be used.
        """
        from comlrl.models import sharding

        sharding.shard([*{id(agent.model): agent for agent in self.agents}.values()])
        for agent in self.agents:
            agent.fast, agent.sharded = None, True

    @contextlib.contextmanager
    def acting(self, index: int) -> Iterator[Agent]:
        """Activate the agent's adapter, for generation and for its update.

        With a router, this affects only the calling thread.
        """
        agent = self.actor(index)
        if agent.router is not None:
            with agent.router.only(agent.adapter):
                yield agent
            return
        if agent.peft is not None and agent.peft.active_adapter != agent.adapter:
            agent.peft.set_adapter(agent.adapter)
            self._train_all_adapters(agent.peft)
        yield agent

    @contextlib.contextmanager
    def reference(self, index: int) -> Iterator[Agent]:
        """Activate the reference policy, which is the run's initial policy.

        It is the base with the adapter off, the base with a frozen copy of the initial adapter, or
        a frozen copy of the whole model. An agent that is not trained is its own reference.
        Raises RuntimeError if no copy was kept.
        """
        agent = self.agents[index]
        if not agent.trained:
            with self.acting(index):
                yield agent
            return
        if agent.router is not None:
            with agent.router.only(agent.start_adapter):
                yield agent
            return
        if agent.peft is not None:
            with through(lora_layers(agent.model), agent.start_adapter):
                yield agent
            return
        if agent.start is None:
            raise RuntimeError("no reference policy was kept; build the team with reference=True")
        yield agent.start

    def save(self, folder: Path) -> None:
        """Write ``folder/agent_N/`` in PEFT's format, or transformers' for whole models.

        Called by all processes; the main one writes.
        """
        if not distributed.is_main():
            return
        for agent in self.agents:
            target = folder / agent.adapter
            if agent.peft is None:
                agent.model.save_pretrained(target)
            else:
                agent.peft.save_pretrained(
                    str(folder),
                    selected_adapters=[agent.adapter],
                    save_embedding_layers=False,  # they are the base's; "auto" asks a hub for them
                )
            agent.tokenizer.save_pretrained(target)

    def parts(self) -> dict[str, Agent | Reference | Untrained]:
        """Return the team's parts of a checkpoint, by name.

        These are trained agents, separate references, and digests of agents that ``init_from``
        initialized and that are not trained.
        """
        parts: dict[str, Agent | Reference | Untrained] = {}
        for agent in self.agents:
            if agent.trained:
                parts[agent.adapter] = agent
            elif self.begun_elsewhere:
                parts[f"untrained_{agent.index}"] = Untrained(agent)
        return parts | {f"{REFERENCE}_{agent.index}": Reference(agent) for agent in self._started}

    def load_tensors(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Load the weights of ``parts``, and any weights of agents that are not trained.

        Raises UserError if they do not match.
        """
        for name, part in self.parts().items():
            if not isinstance(part, Untrained):
                part.load_tensors(tensors[name])
        for agent in self.agents:
            if not agent.trained and agent.adapter in tensors:
                agent.load_tensors(tensors[agent.adapter])

    def begin_with(self, tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Load initial weights, by ``agent_N``, which are also the reference."""
        for agent in self.agents:
            if agent.adapter in tensors:  # a checkpoint lacks those that were not trained
                agent.load_tensors(tensors[agent.adapter])
        for agent in self._started:
            Reference(agent).load_tensors(tensors[agent.adapter])

    @property
    def _started(self) -> list[Agent]:
        """Agents with a separate reference that ``init_from`` initialized."""
        held = [a for a in self.agents if a.start is not None or a.start_adapter is not None]
        return held if self.begun_elsewhere else []

    def _train_all_adapters(self, peft: PeftModel) -> None:
        # set_adapter freezes the others, but a step needs the gradients of every agent.
        for agent in self.agents:
            if agent.peft is peft:
                for parameter in agent.parameters():
                    parameter.requires_grad_(True)
