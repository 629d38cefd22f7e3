"""An OpenAI-compatible endpoint, by which a program written for a server is an episode.

It serves chat completions on 127.0.0.1, in the event loop of the episodes. Each episode has its own
path and key, so that a request finds its episode and strangers do not. A request becomes the
episode's calls: token ids and log-probabilities are the sampler's own, and no text is tokenized
again. What a request asks for is given, or refused by name with status 400.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import h11

from comlrl.errors import UserError
from comlrl.programs.connection import BadRequest, Connection
from comlrl.programs.messages import messages, offered
from comlrl.programs.program import Address, EpisodeError, UnknownAgent
from comlrl.programs.running import RunningEpisode
from comlrl.quoting import one_line
from comlrl.types import Completion, Message, Sampling

MAX_CONNECTIONS = 4096
BACKLOG = 1024  # connections that wait while a wave is sampled
MAX_CHOICES = 128
# Parameters that do not change the policy that samples.
WITHOUT_EFFECT = frozenset({
    "model", "messages", "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "service_tier", "parallel_tool_calls", "tools",
})  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # the values of others that ask for nothing
    "stream": (False,), "stop": ([],), "seed": (), "tool_choice": ("none", "auto"),
    "functions": ([],), "function_call": ("none", "auto"), "logprobs": (False,),
    "top_logprobs": (0,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "min_p": (0,), "response_format": ({"type": "text"},),
    "stream_options": (), "modalities": (["text"],), "reasoning_effort": (), "prediction": (),
    "audio": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip

_Route = Callable[[bytes], Awaitable[dict[str, Any]]]  # a request's body → its reply


class Endpoint:
    """The server of all episodes of a rollout; closed with their event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers while ``loop`` runs. Made and asked for addresses by any thread."""
        self._loop = loop
        self._connections: set[asyncio.StreamWriter] = set()
        self._episodes: dict[str, tuple[str, RunningEpisode]] = {}  # by path: its key, and itself
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # None: nobody has asked for an address
        self._server: asyncio.Task[asyncio.Server] | None = None

    def open(self, running: RunningEpisode) -> Address:
        """A path and a key for an episode."""
        with self._lock:
            if self._socket is None:
                self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
                self._loop.call_soon_threadsafe(self._start, self._socket)
        path, key = secrets.token_hex(8), secrets.token_hex(16)
        self._episodes[path] = (key, running)
        return Address(f"http://127.0.0.1:{self._socket.getsockname()[1]}/{path}/v1", key)

    def _start(self, listening: socket.socket) -> None:
        # asyncio calls listen() again, where nothing else is given with a backlog of 100.
        serving = asyncio.start_server(self._serve, sock=listening, backlog=BACKLOG)
        self._server = self._loop.create_task(serving)

    def close(self) -> None:
        """Ends all connections, in the next round of the event loop, and takes no more."""
        for writer in self._connections:
            writer.transport.abort()
        if self._server is not None and self._server.done() and not self._server.cancelled():
            self._server.result().close()
        if self._socket is not None:
            self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; whatever happens on it concerns nobody else."""
        self._connections.add(writer)
        try:
            connection = Connection(reader, writer)
            if len(self._connections) > MAX_CONNECTIONS:
                busy = HTTPStatus.SERVICE_UNAVAILABLE
                await connection.send(busy, _error(busy, "too many connections"))
            else:
                while await self._exchange(connection):
                    pass
            await connection.discard()
        except (ConnectionError, TimeoutError, asyncio.TimeoutError, h11.RemoteProtocolError):
            pass  # the client is gone, or speaks something else
        except asyncio.CancelledError:
            pass  # all ends; asyncio before Python 3.12 prints a traceback for what is cancelled
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _exchange(self, connection: Connection) -> bool:
        """A request and its reply; whether another may follow on the connection."""
        try:
            route = self._route(await connection.head())  # strangers are refused before their body
            body = await connection.body()
            reply = await connection.unless_gone(self._reply(route, body))
            status = HTTPStatus.OK
        except BadRequest as error:
            status, reply = error.status, _error(error.status, str(error))
        return await connection.send(status, reply)

    async def _reply(self, route: _Route, body: bytes) -> dict[str, Any]:
        try:
            return await route(body)
        except BadRequest:
            raise
        except Exception as error:  # ours: the client gets one line of it
            self._loop.call_exception_handler(
                {"message": "the endpoint cannot answer a request", "exception": error}
            )
            why = one_line(f"{type(error).__name__}: {error}")
            raise BadRequest(HTTPStatus.INTERNAL_SERVER_ERROR, why) from error

    def _route(self, request: h11.Request) -> _Route:
        """What answers a request, given its body. Raises BadRequest."""
        path = request.target.decode("ascii", "replace").split("?")[0].strip("/")
        episode, _, resource = path.partition("/")
        running = self._episode(episode, dict(request.headers).get(b"authorization", b""))
        route = ROUTES.get((request.method, resource))
        if route is None:
            raise BadRequest(
                HTTPStatus.NOT_FOUND, "there are POST chat/completions and GET models here"
            )
        return partial(route, running)

    def _episode(self, path: str, authorization: bytes) -> RunningEpisode:
        key, running = self._episodes.get(path, ("", None))
        if running is None or not secrets.compare_digest(authorization, f"Bearer {key}".encode()):
            raise BadRequest(HTTPStatus.UNAUTHORIZED, "no episode has this path and this key")
        return running


async def _models(running: RunningEpisode, body: bytes) -> dict[str, Any]:
    names = running.program.names_N
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


async def _chat(running: RunningEpisode, body: bytes) -> dict[str, Any]:
    """A chat completion: each choice is a call of the episode."""
    asked = _parsed(body)
    try:
        agent = running.program.index(asked.get("model", ""))
        _check_sampling(asked, running.settings.sampling.of(agent))
        count = _count(asked)
        prompt = _prompt(asked)
        drawn = await _all(*(running.call(agent, prompt) for _ in range(count)))
    except UnknownAgent as error:
        raise BadRequest(HTTPStatus.NOT_FOUND, f"model: {error}") from error
    except (ValueError, EpisodeError, UserError) as error:
        raise BadRequest(HTTPStatus.BAD_REQUEST, str(error)) from error
    read = len(running.context.encode(agent, prompt))
    written = sum(len(completion.token_ids) for completion in drawn)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked["model"],
        "choices": [_choice(i, completion) for i, completion in enumerate(drawn)],
        "usage": {
            "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        },
    }  # fmt: skip


ROUTES: Mapping[tuple[bytes, str], Callable[[RunningEpisode, bytes], Awaitable[dict[str, Any]]]] = {
    (b"GET", "v1/models"): _models,
    (b"POST", "v1/chat/completions"): _chat,
}


async def _all(*calls: Coroutine[Any, Any, Completion]) -> list[Completion]:
    """What all of them give. Where one fails or nobody waits any more, the others are withdrawn."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": completion.text},
        "logprobs": None,
        "finish_reason": "stop" if completion.finished else "length",
    }


def _check_sampling(asked: Mapping[str, Any], sampling: Sampling) -> None:
    """Raises ValueError for a parameter that asks for another distribution than the run samples
    from, which is the one that it trains."""
    own = {
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k,
    }
    for name, value in asked.items():
        if value is None or name in WITHOUT_EFFECT or name == "n":
            continue
        if name in ("max_tokens", "max_completion_tokens"):
            if not isinstance(value, int) or value < sampling.max_new_tokens:
                raise ValueError(
                    f"{name}: {value!r}; the run's max_new_tokens is {sampling.max_new_tokens}: "
                    "leave it out, or give at least that"
                )
        elif name in own:
            if value != own[name]:
                raise ValueError(
                    f"{name}: {value!r}; the run samples with {own[name]}: leave it out"
                )
        elif value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name}: {str(value)[:80]!r} cannot be followed here: leave it out")


def _count(asked: Mapping[str, Any]) -> int:
    """How many completions are asked for. Raises ValueError."""
    count = asked.get("n")
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise ValueError(f"n: {count!r}; give 1 to {MAX_CHOICES}")
    return count


def _prompt(asked: Mapping[str, Any]) -> tuple[Message, ...]:
    """A request's messages, and before them its tools, if it may call them. Raises ValueError."""
    given = asked.get("messages")
    if not isinstance(given, list):
        raise ValueError("messages: give a list of objects with role and content")
    tools = () if asked.get("tool_choice") == "none" else offered(asked.get("tools"))
    return tools + messages([_message(one) for one in given])


def _message(given: Any) -> Message:
    """A message of a request, whose content may be a list of texts. Raises ValueError."""
    if not isinstance(given, Mapping):
        raise ValueError(f"messages: {str(given)[:80]!r}; give an object with role and content")
    if given.get("tool_calls"):
        raise ValueError("messages: `tool_calls` cannot be followed here; write them as text")
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(_text(part) for part in content)
    return Message(given.get("role", ""), "" if content is None else content)


def _text(part: Any) -> str:
    """Of a part of a message. Raises ValueError for other parts than texts."""
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError("messages: only parts of type text can be read")
    return text


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the body is not JSON") from error
    if not isinstance(found, Mapping):
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
    return found


def _error(status: HTTPStatus, text: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": text, "type": kind, "code": None}}
