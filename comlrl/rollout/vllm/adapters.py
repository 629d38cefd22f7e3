"""The agents' adapters as files, and on the servers that sample for them.

When weights have changed, the adapter is written to a folder that the servers read, and loaded
under a new name; then the previous one is unloaded. A name contains a random id of the run and the
number of operations that have changed the weights. Names are never reused for other weights,
because a server could answer from a stale cache.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from safetensors.torch import save_file

from comlrl.models.agent import Agent
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.rollout import background
from comlrl.rollout.vllm.servers import Servers

MEMORY = Path("/dev/shm")  # a file system in memory
LOCAL = {"localhost", "127.0.0.1", "::1", socket.gethostname()}  # names of this machine
HOLDS = 4  # copies of the adapters that must fit there: new, replaced and pinned ones


class Adapters:
    """The adapters of a team. Processes that share a server use one name for the same weights."""

    def __init__(self, team: Team, servers_N: Sequence[Servers], folder: Path) -> None:
        """Initialize.

        ``servers_N``: of each agent. ``folder``: for files, which the servers read too; they are in
        memory if all servers are on this machine.
        """
        self.team, self.servers_N = team, servers_N
        self._entry = folder / f"process_{distributed.rank()}"
        shutil.rmtree(self._entry.resolve(), ignore_errors=True)  # of a process that was killed
        self._entry.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if self._fit_memory():
            self._entry.symlink_to(tempfile.mkdtemp(prefix="comlrl-", dir=MEMORY))
            shutil.copymode(folder, self._entry)  # a server may be another user's
        self.folder = self._entry.resolve()
        self.run = distributed.from_main(lambda: secrets.token_hex(3))  # others may share a server
        self.names: dict[int, str] = {}  # agent → its loaded adapter
        self._pinned: dict[str, int] = {}  # name → agent, of those that stay loaded

    def load_moved(self, first: bool = False) -> None:
        """Load adapters whose weights have changed, then unload those that they replace.

        Raises ServerError if they are refused; with ``first``, also if a server does not answer.
        """
        moved = []
        for agent in self.team.agents:
            # In-place operations, whose number is the same on every process.
            count = sum(weight._version for weight in agent.named().values())
            name = f"{agent.adapter}-{self.run}-{count}"
            if name != self.names.get(agent.index):
                self.names[agent.index] = name
                moved.append(agent)
        with ThreadPoolExecutor(len(self.team)) as pool:
            list(pool.map(self._write, moved))
        self._give(first)

    def pin(self, pinned: bool) -> None:
        """Keep the current adapters loaded even after they are replaced; False: keep none."""
        self._pinned = self._present() if pinned else {}
        self._give()

    def close(self) -> None:
        """Unload adapters from servers that still answer, and remove the files."""
        background.run(servers.give({}) for servers in dict.fromkeys(self.servers_N))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._entry.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other processes' are there yet
            self._entry.parent.rmdir()

    def _write(self, agent: Agent) -> None:
        """Write an adapter in PEFT's format and in the model's precision, in which the server
        computes."""
        assert agent.peft is not None
        folder = self.folder / self.names[agent.index]
        folder.mkdir(parents=True)
        dtype = agent.model.dtype
        weights = {
            name: weight.detach().to("cpu", dtype).contiguous()
            for name, weight in agent.named().items()
        }
        save_file(weights, folder / "adapter_model.safetensors")
        agent.peft.peft_config[agent.adapter].save_pretrained(str(folder))

    def _fit_memory(self) -> bool:
        """Return whether all servers are on this machine, and adapters fit in its memory."""
        urls = [server.url for servers in self.servers_N for server in servers.members]
        if not os.access(MEMORY, os.W_OK) or any(httpx.URL(url).host not in LOCAL for url in urls):
            return False
        size = sum(
            weight.numel() * agent.model.dtype.itemsize
            for agent in self.team.agents
            for weight in agent.named().values()
        )
        copies = HOLDS * distributed.local_world_size()
        return shutil.disk_usage(MEMORY).free >= copies * size

    def _present(self) -> dict[str, int]:
        return {name: agent for agent, name in self.names.items()}

    def _give(self, first: bool = False) -> None:
        """Make each server load the adapters of its agents, and no others."""
        adapters_of: dict[Servers, dict[str, str]] = {servers: {} for servers in self.servers_N}
        wanted = self._pinned | self._present()
        for name, index in wanted.items():
            adapters_of[self.servers_N[index]][name] = str(self.folder / name)
        background.run(s.give(adapters, first) for s, adapters in adapters_of.items())
        for path in self.folder.glob("*"):
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)
