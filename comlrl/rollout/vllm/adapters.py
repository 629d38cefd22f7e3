"""The agents' adapters as files, and on the servers that sample for them.

Whenever weights have moved, the adapter is written to a folder that the servers read and loaded
under a new name; then the one before is unloaded. A name ends in a digest of the weights: a name
that was used for other weights could be answered from a stale cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.rollout import background
from comlrl.rollout.vllm.servers import Servers

_Job = Coroutine[Any, Any, None]


class Adapters:
    """Several processes may share a server: they give the same weights one name."""

    def __init__(self, team: Team, servers_N: Sequence[Servers], folder: Path) -> None:
        """Initialize. ``servers_N``: of each agent; ``folder``: also read by the servers."""
        self.team, self.servers_N = team, servers_N
        self.folder = (folder / f"process_{distributed.rank()}").resolve()
        self.run = distributed.from_main(lambda: secrets.token_hex(3))  # others may share a server
        self.names: dict[int, str] = {}  # of each agent's adapter as it is loaded
        self._replaced: dict[str, int] = {}  # loaded before, not unloaded yet → its agent
        self._pinned: frozenset[str] = frozenset()  # not to be unloaded
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was killed

    def begin(self) -> None:
        """Load the first ones. Raises ServerError where a server does not take them. This, like
        ``load_moved`` and ``pin``, is a collective call where models are split."""
        self._load(self._moved(), Servers.begin)

    def load_moved(self) -> None:
        """Load the adapters that have moved, then unload those that they replace. Raises
        Refused."""
        self._load(self._moved(), Servers.load)
        self._unload_replaced()

    def pin(self, pinned: bool) -> None:
        """Keep the present adapters loaded, also when they are replaced; False: none."""
        self._pinned = frozenset(self.names.values()) if pinned else frozenset()
        self._unload_replaced()

    def close(self) -> None:
        """Unload adapters from the servers that are still there, and remove the files."""
        loaded = self._replaced | {name: agent for agent, name in self.names.items()}
        self._run(loaded, Servers.unload)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes' are there yet
            self.folder.parent.rmdir()

    def _moved(self) -> dict[str, int]:
        """Write the adapters that have moved; returns their new names, each with its agent."""
        moved = {}
        weights_N = [agent.peft_state() for agent in self.team.agents]
        for agent, weights in zip(self.team.agents, weights_N, strict=True):
            name = f"{agent.adapter}-{self.run}-{_digest(weights)}"
            if name == self.names.get(agent.index):
                continue
            moved[name] = agent.index
            if self.team.processes.lock_step and not distributed.is_main():
                continue
            assert agent.peft is not None
            agent.peft.save_pretrained(
                str(self.folder / name),
                selected_adapters=[agent.adapter],
                state_dict=weights,
                save_embedding_layers=False,  # they are the base's; "auto" asks a hub for them
            )
        return moved

    def _load(
        self, moved: Mapping[str, int], load: Callable[[Servers, Mapping[str, str]], _Job]
    ) -> None:
        def load_files(servers: Servers, names: Iterable[str]) -> _Job:
            adapter_of = {name: self.team.agents[moved[name]].adapter for name in names}
            return load(servers, {n: str(self.folder / n / a) for n, a in adapter_of.items()})

        for name, agent in moved.items():
            if agent in self.names:
                self._replaced[self.names[agent]] = agent
            self.names[agent] = name
            self._replaced.pop(name, None)
        self.team.processes.once(lambda: self._run(moved, load_files))

    def _unload_replaced(self) -> None:
        gone = {n: agent for n, agent in self._replaced.items() if n not in self._pinned}
        self._run(gone, Servers.unload)
        for name in gone:
            del self._replaced[name]
            shutil.rmtree(self.folder / name, ignore_errors=True)  # in lock-step: the first's

    def _run(self, agent_of: Mapping[str, int], job: Callable[[Servers, list[str]], _Job]) -> None:
        """Run a job for all servers together, each with the names of its agents' adapters.
        ``agent_of``: name → agent."""
        names_of: dict[Servers, list[str]] = {}
        for name, agent in agent_of.items():
            names_of.setdefault(self.servers_N[agent], []).append(name)
        background.run(job(servers, names) for servers, names in names_of.items())


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for tensor in weights.values():
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
