"""Several vLLM servers of one model, as one: requests are spread, adapters are on each of them.

Requests of one task go to one server, whose cache then holds the prompts' common beginning: servers
are ranked by a hash of the server, the adapter and the task (rendezvous hashing, Thaler and
Ravishankar 1998). A server that does not answer is left out, and its requests are sampled by the
others. It is taken back once it answers and has the present adapters.

A run that was asked to end by a signal waits for no server that is away, and not long for one that
is silent: whoever sent the signal kills it after some minutes, and it has still to save.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from comlrl.errors import notice
from comlrl.files import raise_open_limit
from comlrl.rollout.background import event_loop, gather
from comlrl.rollout.vllm.replies import KEY, MAX_REPLY, Refused, ServerError
from comlrl.rollout.vllm.server import Late, Server

LONGEST_WAIT = 30.0  # seconds between two looks at a server that is away
LAST_WAIT = 120.0  # seconds without an answer, for a run that was asked to end
PAUSE = 1.0  # seconds between two looks at whether the run was asked to end
RELOADS = 3  # of an adapter that a restarted server does not have

T = TypeVar("T")


class Servers:
    """Servers of one model. The coroutines run in the clients' event loop, which alone changes the
    fields; ``leave`` may be called by any thread."""

    def __init__(
        self,
        urls: Sequence[str],
        patience: float,
        first_wait: float = 1.0,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        """Initialize.

        ``patience``: seconds without an answer, and after which servers that are all away are given
        up. ``first_wait``: seconds before a missing server is first tried again; doubled each time.
        ``ending``: whether the run is about to end.
        """
        self.patience, self.first_wait, self.ending = patience, first_wait, ending
        self.members = tuple(map(Server, urls))
        self.away: dict[Server, asyncio.Task[None]] = {}  # and what ends once they are back
        self._waits: dict[Server, float] = {}  # seconds, of those without an answer since a failure
        self._adapters: dict[str, str] = {}  # name → folder, of those that all shall have
        self._unloaded: set[str] = set()  # a server that was away may still have them
        self._failure = ""  # the latest
        self._answered = 0.0  # when a request was last answered
        self._left = ""  # why nothing is waited for any more
        self._jobs: set[asyncio.Task[Any]] = set()  # that somebody waits for
        self._watcher: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self.members)

    async def begin(self, adapters: Mapping[str, str]) -> None:
        """Load the first adapters on all servers. Raises ServerError where a server does not take
        them."""
        raise_open_limit()  # each request has a connection
        self._watcher = asyncio.create_task(self._watch())
        self._adapters |= adapters
        await gather(
            self._unless_left(server.load(adapters, self.patience)) for server in self.members
        )

    async def load(self, adapters: Mapping[str, str]) -> None:
        """Load adapters, name → folder, on all servers together. Raises Refused."""
        self._adapters |= adapters
        self._unloaded -= adapters.keys()
        await gather(self._unless_left(self._load(server, adapters)) for server in self._here())

    async def unload(self, names: Collection[str]) -> None:
        """Unload adapters everywhere; from a missing server once it is back."""
        for name in names:
            self._adapters.pop(name, None)
        self._unloaded |= set(names)
        await gather(server.unload(names) for server in self._here())

    async def ask(
        self, prefix: str, path: str, body: Mapping[str, Any], most: int = MAX_REPLY
    ) -> tuple[str, Any]:
        """Return the server that has answered a request, and the answer. ``prefix``: what its
        prompt has in common with others. ``body["model"]`` names an adapter that was loaded. Raises
        ServerError where the servers are given up, Refused and BadReply."""
        return await self._unless_left(self._ask(prefix, path, body, most))

    def leave(self, reason: str = "") -> None:
        """Wait for nothing any more; requests that are under way raise ServerError with
        ``reason``."""
        event_loop().call_soon_threadsafe(self._leave, reason)

    def _leave(self, reason: str) -> None:
        if self._left or not self.members:  # the adapters may be being unloaded
            return
        self._left = reason or f"{KEY}: {self._urls} is not asked any more"
        tasks = {*self._jobs, *self.away.values()}
        for task in tasks | ({self._watcher} if self._watcher else set()):
            task.cancel()

    @property
    def _urls(self) -> str:
        return ", ".join(f"'{server.url}'" for server in self.members)

    def _here(self) -> list[Server]:
        return [server for server in self.members if server not in self.away]

    async def _unless_left(self, job: Coroutine[Any, Any, T]) -> T:
        """Wait for a job. Raises ServerError where the servers are left before it ends."""
        task = asyncio.create_task(job)
        self._jobs.add(task)
        if self._left:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._left:
                raise ServerError(self._left) from None
            raise
        finally:
            self._jobs.discard(task)

    async def _ask(
        self, prefix: str, path: str, body: Mapping[str, Any], most: int
    ) -> tuple[str, Any]:
        failed: set[Server] = set()
        since = math.inf  # when the time without an answer began
        while True:
            server, began = await self._choose(prefix, failed, since), time.monotonic()
            try:
                reply = await self._answer(server, path, body, most)
            except ServerError as error:
                if not error.may_pass:
                    raise
                silent = isinstance(error, Late)  # all the while
                since = min(since, began if silent else time.monotonic())
                failed.add(server)
                self._lose(server, str(error))
                continue
            self._answered = time.monotonic()
            if self._waits.pop(server, None) and len(self) > 1:
                notice(f"{KEY}: '{server.url}' answers again")
            return server.url, reply

    async def _choose(self, prefix: str, failed: set[Server], since: float) -> Server:
        """Return the first in the prefix's ranking of the servers that are there, one that has not
        ``failed`` if possible. Waits for one to return. Raises ServerError where all are given
        up."""
        while True:
            here = self._here()
            if not here:
                since = min(since, time.monotonic())
            left = self.patience - (time.monotonic() - max(since, self._answered))
            ending = self.ending()
            if (ending or left <= 0) and failed >= set(here):
                late = f"no better for {self.patience:g} s"
                reason = "the run was asked to end" if ending else late
                self._leave(f"{self._failure}, and {reason}")
                raise ServerError(self._left)
            if here:
                return max(
                    [server for server in here if server not in failed] or here,
                    key=lambda server: rank(server.url, prefix),
                )
            await asyncio.wait(
                self.away.values(),
                timeout=max(0, min(PAUSE, left)),
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _answer(self, server: Server, path: str, body: Mapping[str, Any], most: int) -> Any:
        name = body["model"]
        for _ in range(RELOADS):
            try:
                return await server.ask(path, body, self.patience, most)
            except Refused as error:
                if error.status != 404 or name not in self._adapters:
                    raise
            # The server was restarted.
            await server.load({name: self._adapters[name]}, self.patience)
        raise ServerError(f"{KEY}: '{server.url}' does not keep the adapter {name}")

    async def _load(self, server: Server, adapters: Mapping[str, str]) -> None:
        try:
            await server.load(adapters, self.patience)
        except ServerError as error:
            if not error.may_pass:
                raise
            self._lose(server, str(error))

    def _lose(self, server: Server, failure: str) -> None:
        """Exclude a server until it answers again."""
        self._failure = failure
        if server in self.away:
            return
        self.away[server] = asyncio.create_task(self._take_back(server))
        if len(self) > 1 and server not in self._waits:
            left = len(self._here())
            others = f"{left} of {len(self)} servers continue" if left else "no other is there"
            notice(f"{failure}; it is left out until it answers, {others}")
        self._waits.setdefault(server, self.first_wait)

    async def _take_back(self, server: Server) -> None:
        """Poll a server until it answers and has the adapters."""
        while True:
            wait = self._waits.get(server, self.first_wait)
            await asyncio.sleep(wait)
            self._waits[server] = min(2 * wait, LONGEST_WAIT)
            try:
                await self._catch_up(server)
            except ServerError as error:
                self._failure = str(error)
            else:
                del self.away[server]
                return

    async def _catch_up(self, server: Server) -> None:
        """Load what a server that was away lacks, and unload what the others no longer have."""
        wanted: dict[str, str] | None = None
        while wanted != self._adapters:  # they may move meanwhile
            wanted = dict(self._adapters)
            present = set(await server.names())
            await server.unload(present & self._unloaded)
            missing = {name: path for name, path in wanted.items() if name not in present}
            await server.load(missing, self.patience)

    async def _watch(self) -> None:
        """Give up servers that are silent once the run was asked to end."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(PAUSE)
            waiting = self.ending() and self._jobs
            since = max(since, self._answered) if waiting else time.monotonic()
            if time.monotonic() - since >= LAST_WAIT:
                silent = f"no answer for {LAST_WAIT:g} s since the run was asked to end"
                self._leave(f"{KEY}: {self._urls}: {silent}")


def rank(url: str, prefix: str) -> bytes:
    """Return a server's rank for requests of a prefix; the greatest is the first choice."""
    return hashlib.blake2b(
        f"{url}\n{prefix}".encode(errors="surrogatepass"), digest_size=8
    ).digest()
