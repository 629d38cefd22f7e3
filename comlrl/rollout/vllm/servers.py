"""HTTP clients of vLLM servers: of one server, and of several with the same model.

They must have been started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` (docs/scaling.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import math
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx

from comlrl.errors import ServerError, UserError, notice
from comlrl.files import raise_open_limit
from comlrl.quoting import one_line
from comlrl.rollout.api_client import key_of
from comlrl.rollout.background import gather, submit
from comlrl.rollout.vllm.replies import KEY, ROUNDING, BadReply, completions, models

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"  # also returns what truncation left
SHORT = 10.0  # seconds for a connection, and for answers that need no computation
FIRST = 300.0  # seconds for the first token, for which kernels may be compiled
MAX_REPLY = 1 << 20  # bytes, besides those of the tokens that were requested
PASSING = frozenset({408, 429})  # statuses of temporary errors, besides all ≥ 500
LONGEST_WAIT = 30.0  # maximum seconds between two polls of an unreachable server
LAST_WAIT = 120.0  # seconds without an answer, for a run that was asked to end
PAUSE = 1.0  # seconds between two checks of whether the run was asked to end
RELOADS = 3  # of an adapter that a restarted server does not have

T = TypeVar("T")


class Failure(ServerError):
    """No answer (``status`` is 0; ``late``: it timed out), or an error as the answer."""

    def __init__(self, url: str, reason: str, status: int = 0, late: bool = False) -> None:
        self.reason, self.status, self.late = one_line(reason), status, late
        self.may_pass = not status or status >= 500 or status in PASSING
        answer = f" answers HTTP {status}" if status else ""
        super().__init__(f"{KEY}: '{url}'{answer}: {self.reason}")


class Server:
    """A client of one server. Its coroutines run in the event loop of ``background``; other threads
    call the checks."""

    def __init__(self, url: str) -> None:
        """Initialize. ``url``: without ``/v1`` or a final slash. Raises UserError for a malformed
        one."""
        self.url = url
        self.loaded: set[str] = set()  # adapters, as far as the client can tell
        self.lock = asyncio.Lock()  # of loading and unloading
        self.wait = 0.0  # seconds until the next poll; 0: no failure since it last answered
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := key_of("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            self._client = httpx.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=SHORT),
                # A new connection for each request: an idle one may be closed as it is used.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=ssl.create_default_context() if url.startswith("https") else False,
                follow_redirects=False,  # a redirect would receive the key
                trust_env=False,  # no proxies from the environment
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{KEY}: '{url}' is not an address ({error})") from error

    def check(self) -> tuple[str, int | None]:
        """Return the base model's name, and the server's token limit, if it reports one.

        Raises UserError if it cannot be reached.
        """
        try:
            (base, *_), length = models(self.url, submit(self.ask("/v1/models")).result())
        except BadReply as error:
            raise UserError(str(error)) from error
        except Failure as error:
            raise UserError(
                f"{KEY}: '{self.url}' cannot be reached ({error.reason}); start the server "
                "(docs/scaling.md), or set generation.backend=builtin"
            ) from error
        return base, length

    def check_logprobs(self, base: str, *, support: bool) -> None:
        """Raise UserError unless log-probabilities include temperature and truncation.

        With a single surviving token they must be 0. ``support``: the server must also return the
        tokens that survive truncation.
        """
        params = {"max_tokens": 8, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        params["ignore_eos"] = True
        path, body = COMPLETIONS, {"prompt": [0], "return_token_ids": True} | params
        if support:
            path, body = GENERATE, {"token_ids": [0], "sampling_params": params}
        try:
            reply = submit(self.ask(path, {"model": base} | body, FIRST)).result()
            (drawn,) = completions(
                self.url, reply, count=1, max_tokens=8, vocabulary=sys.maxsize, support=support
            )
        except (Failure, BadReply) as error:
            if not support:
                raise UserError(str(error)) from error
            raise UserError(
                f"'{self.url}' does not return the tokens that survive it ({error.reason}); "
                "start it with --enable-scale-out --return-sampling-mask (docs/scaling.md)"
            ) from error
        if abs(sum(drawn.logprob_L)) > ROUNDING:
            raise UserError(
                f"'{self.url}' returns log-probabilities without the temperature and truncation of "
                "sampling; start it with --logprobs-mode processed_logprobs"
            )

    async def names(self) -> list[str]:
        """Return all names that requests may use. Raises as ``ask`` does."""
        return models(self.url, await self.ask("/v1/models"))[0]

    async def load(self, name: str, path: str, seconds: float) -> None:
        """Load an adapter unless the server has it. Raises as ``ask`` does."""
        try:
            adapter = {"lora_name": name, "lora_path": path}
            await self.ask("/v1/load_lora_adapter", adapter, seconds)
        except Failure as error:
            if not error.status or name not in await self.names():  # another process was first
                raise

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = SHORT,
        most: int = MAX_REPLY,
    ) -> Any:
        """Return the answer to a GET, or to a POST if there is a body.

        ``seconds``, ``most``: limits on the time and bytes of the complete answer. Raises Failure,
        BadReply, and ServerError if this process has too many open files.
        """
        try:
            response, text = await asyncio.wait_for(self._exchange(path, body, most), seconds)
        except asyncio.TimeoutError:
            raise Failure(self.url, f"no complete answer within {seconds:g} s", late=True) from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            causes = list(_causes(error))
            for cause in causes:
                if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                    raise ServerError(  # not the server's fault
                        f"{KEY}: '{self.url}': no connection, {cause.strerror}; raise `ulimit -n`"
                    ) from error
            reason = f"{type(causes[-1]).__name__}: {causes[-1]}"
            raise Failure(self.url, reason) from error
        if response.status_code >= 300:
            raise Failure(self.url, _reason(response, text), response.status_code)
        if len(text) > most:
            raise BadReply(self.url, f"more than {most} bytes")
        if not text.startswith((b"{", b"[")):  # the answer to loading and unloading is a sentence
            return text.decode(errors="replace")
        try:
            return json.loads(text)
        except RecursionError:
            raise BadReply(self.url, "JSON that is nested too deep") from None
        except ValueError as error:
            raise Failure(self.url, f"not JSON: {error}") from error

    async def _exchange(
        self, path: str, body: Mapping[str, Any] | None, most: int
    ) -> tuple[httpx.Response, bytes]:
        """Return a response and its body; stop reading if it exceeds ``most`` bytes."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        text = bytearray()
        async with self._client.stream(method, path, content=content) as response:
            async for part in response.aiter_raw():
                text += part
                if len(text) > most:
                    break
        return response, bytes(text)


class Servers:
    """A client of several servers of one model.

    Each server loads all adapters. A task's requests go to one server, which then caches the
    prompts' common prefix (rendezvous hashing, Thaler and Ravishankar 1998). A server that does not
    answer is excluded, and the next one in a task's ranking samples for it, until it answers again
    and has the current adapters.

    A run that a signal asks to end does not wait for unreachable servers, and only briefly for
    silent ones: it must save before the sender of the signal kills it.

    Coroutines run in the event loop of ``background``; any thread may call ``leave``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        patience: float,
        first_wait: float = 1.0,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        """Initialize.

        ``patience``: seconds to wait for an answer, and for any server if all are unreachable.
        ``first_wait``: seconds before an unreachable server is first polled; doubled each time.
        ``ending``: returns whether the run is about to end.
        """
        self.patience, self.first_wait, self.ending = patience, first_wait, ending
        self.members = tuple(map(Server, urls))
        self._urls = ", ".join(f"'{url}'" for url in urls)
        self.away: dict[Server, asyncio.Task[None]] = {}  # task: ends once the server is back
        self._adapters: dict[str, str] = {}  # name → folder, for all servers
        self._replaced: set[str] = set()  # a server that was away may still have them
        self._failure = ""  # the latest
        self._answered = 0.0  # when a request was last answered
        self._left = ""  # why waiting has stopped
        raise_open_limit()  # each request has a connection

    async def give(self, adapters: Mapping[str, str], first: bool = False) -> None:
        """Load adapters, name → folder, on all servers concurrently, then unload all others.

        Raises ServerError if they are refused; with ``first``, also if a server does not answer.
        """

        async def give(server: Server) -> None:
            try:
                await self._unless_left(self._load(server))
            except ServerError as error:
                if first or self._left or not error.may_pass:
                    raise
                self._lose(server, str(error))

        self._replaced = (self._replaced | self._adapters.keys()) - adapters.keys()
        self._adapters = dict(adapters)
        here = self._here()
        if any(adapters.keys() - server.loaded for server in here):
            await gather(map(give, here))
        await gather(map(self._unload, self._here()))

    async def ask(
        self, prefix: str, path: str, body: Mapping[str, Any], most: int = MAX_REPLY
    ) -> tuple[str, Any]:
        """Return the URL of the server that answered a request, and the answer.

        ``prefix``: equal for requests whose prompts share a prefix. ``body["model"]``: the name of
        a loaded adapter. Raises BadReply, and ServerError if the servers refuse or are given up.
        """
        return await self._unless_left(self._ask(prefix, path, body, most))

    def leave(self, reason: str = "") -> None:
        """Stop waiting; pending requests raise ServerError with ``reason``."""
        self._left = self._left or reason or f"{KEY}: {self._urls} is not asked any more"

    def _here(self) -> list[Server]:
        return [server for server in self.members if server not in self.away]

    async def _unless_left(self, job: Coroutine[Any, Any, T]) -> T:
        """Wait for a job. Raises ServerError if ``leave`` is called before it ends.

        ``leave`` is called here if the run was asked to end and the servers are silent.
        """
        task, since = asyncio.create_task(job), time.monotonic()
        try:
            while not self._left:
                await asyncio.wait({task}, timeout=PAUSE)
                if task.done():
                    return task.result()
                if not self.ending():
                    since = time.monotonic()
                elif time.monotonic() - max(since, self._answered) >= LAST_WAIT:
                    silent = f"no answer for {LAST_WAIT:g} s since the run was asked to end"
                    self.leave(f"{KEY}: {self._urls}: {silent}")
            raise ServerError(self._left)
        finally:
            task.cancel()

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
                silent = isinstance(error, Failure) and error.late  # since ``began``
                since = min(since, began if silent else time.monotonic())
                failed.add(server)
                self._lose(server, str(error))
                continue
            self._answered = time.monotonic()
            if server.wait and len(self.members) > 1:
                notice(f"{KEY}: '{server.url}' answers again")
            server.wait = 0.0
            return server.url, reply

    async def _choose(self, prefix: str, failed: set[Server], since: float) -> Server:
        """Return the reachable server that ranks first for the prefix.

        Prefers servers that have not ``failed``; waits if none is reachable. Raises ServerError if
        all are given up.
        """
        while True:
            here = self._here()
            if not here:
                since = min(since, time.monotonic())
            left = self.patience - (time.monotonic() - max(since, self._answered))
            ending = self.ending()
            if (ending or left <= 0) and failed >= set(here):
                late = f"no better for {self.patience:g} s"
                reason = "the run was asked to end" if ending else late
                self.leave(f"{self._failure}, and {reason}")
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
            except Failure as error:
                if error.status != 404 or name not in self._adapters:
                    raise
            server.loaded.discard(name)  # it was restarted
            await self._load(server)
        raise ServerError(f"{KEY}: '{server.url}' does not keep the adapter {name}")

    async def _load(self, server: Server) -> None:
        """Load the adapters that a server lacks, concurrently."""

        async def load(name: str) -> None:
            if path := self._adapters.get(name):
                await server.load(name, path, self.patience)
                server.loaded.add(name)

        async with server.lock:
            while missing := self._adapters.keys() - server.loaded:  # which may change meanwhile
                await gather(map(load, sorted(missing)))

    async def _unload(self, server: Server) -> None:
        """Unload adapters that are no longer needed; ignore failures."""
        async with server.lock:
            for name in sorted(server.loaded - self._adapters.keys()):
                with contextlib.suppress(ServerError):
                    await server.ask("/v1/unload_lora_adapter", {"lora_name": name})
                server.loaded.discard(name)

    def _lose(self, server: Server, failure: str) -> None:
        """Exclude a server until it answers again."""
        self._failure = failure
        if server in self.away:
            return
        self.away[server] = asyncio.create_task(self._take_back(server))
        if len(self.members) > 1 and not server.wait:
            left = len(self._here())
            others = f"{left} of {len(self.members)} servers continue"
            others = others if left else "no other is there"
            notice(f"{failure}; it is left out until it answers, {others}")
        server.wait = server.wait or self.first_wait

    async def _take_back(self, server: Server) -> None:
        """Poll a server until it answers and has the adapters."""
        while not self._left:
            await asyncio.sleep(server.wait)
            server.wait = min(2 * server.wait, LONGEST_WAIT)
            try:
                ours = self._adapters.keys() | self._replaced
                server.loaded = ours & set(await server.names())
                await self._unload(server)
                await self._load(server)
            except ServerError as error:
                self._failure = str(error)
            else:
                del self.away[server]
                return


def rank(url: str, prefix: str) -> bytes:
    """Return a server's rank for requests of a prefix; the greatest is the first choice."""
    return hashlib.blake2b(
        f"{url}\n{prefix}".encode(errors="surrogatepass"), digest_size=8
    ).digest()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes; of an ExceptionGroup, over the first error."""
    while error is not None:
        yield error
        attempts = getattr(error, "exceptions", ())  # of an ExceptionGroup
        error = attempts[0] if attempts else error.__cause__ or error.__context__


def _reason(response: httpx.Response, text: bytes) -> str:
    """Return what an error's body says, or why a redirect is an error."""
    if response.has_redirect_location:
        where = response.headers["Location"]
        return f"a redirect to '{where}', which is not followed; use that address instead"
    message: Any = text.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(message)
        if isinstance(reply, dict):
            error = reply.get("error", reply)
            message = error.get("message", message) if isinstance(error, dict) else message
    return str(message) or response.reason_phrase
