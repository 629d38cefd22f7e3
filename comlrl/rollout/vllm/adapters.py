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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.rollout import background
from comlrl.rollout.vllm.servers import Servers


class Adapters:
    """Several processes may share a server: they give the same weights one name."""

    def __init__(self, team: Team, servers_N: Sequence[Servers], folder: Path) -> None:
        """Initialize. ``servers_N``: of each agent; ``folder``: also read by the servers."""
        self.team, self.servers_N = team, servers_N
        self.folder = (folder / f"process_{distributed.rank()}").resolve()
        self.run = distributed.from_main(lambda: secrets.token_hex(3))  # others may share a server
        self.names: dict[int, str] = {}  # of each agent's adapter as it is loaded
        self._pinned: dict[str, int] = {}  # name → agent, of those that stay loaded
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was killed

    def load_moved(self, first: bool = False) -> None:
        """Load the adapters that have moved, then unload those that they replace. Raises
        ServerError where they are refused, with ``first`` also where a server does not answer.
        This, like ``pin``, is a collective call where models are split."""
        weights_N = [agent.peft_state() for agent in self.team.agents]
        for agent, weights in zip(self.team.agents, weights_N, strict=True):
            name = f"{agent.adapter}-{self.run}-{_digest(weights)}"
            if name == self.names.get(agent.index):
                continue
            self.names[agent.index] = name
            if self.team.processes.lock_step and not distributed.is_main():
                continue
            assert agent.peft is not None
            agent.peft.save_pretrained(
                str(self.folder / name),
                selected_adapters=[agent.adapter],
                state_dict=weights,
                save_embedding_layers=False,  # they are the base's; "auto" asks a hub for them
            )
        self.team.processes.once(lambda: self._give(first))

    def pin(self, pinned: bool) -> None:
        """Keep the present adapters loaded, also when they are replaced; False: none."""
        self._pinned = self._present() if pinned else {}
        self.team.processes.once(self._give)

    def close(self) -> None:
        """Unload adapters from the servers that are still there, and remove the files."""
        background.run(servers.give({}) for servers in dict.fromkeys(self.servers_N))
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes' are there yet
            self.folder.parent.rmdir()

    def _present(self) -> dict[str, int]:
        return {name: agent for agent, name in self.names.items()}

    def _give(self, first: bool = False) -> None:
        """Have each server hold the adapters of its agents, and no others."""
        adapters_of: dict[Servers, dict[str, str]] = {servers: {} for servers in self.servers_N}
        wanted = self._pinned | self._present()
        for name, index in wanted.items():
            path = self.folder / name / self.team.agents[index].adapter
            adapters_of[self.servers_N[index]][name] = str(path)
        background.run(s.give(adapters, first) for s, adapters in adapters_of.items())
        for path in self.folder.glob("*"):
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for tensor in weights.values():
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
