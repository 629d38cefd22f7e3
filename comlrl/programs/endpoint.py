"""An OpenAI-compatible endpoint through which a program written for a server plays an episode.

It serves chat completions on 127.0.0.1, in the event loop of the episodes. Each episode has a
separate path and key, which route its requests and keep other processes out. A request becomes
calls of the episode: token ids and log-probabilities come from the sampler, and no text is
tokenized again. Parameters that cannot be honored are refused by name with status 400.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from comlrl.errors import UserError
from comlrl.programs import chat
from comlrl.programs.program import Address, EpisodeError, UnknownAgent
from comlrl.programs.running import RunningEpisode
from comlrl.quoting import one_line
from comlrl.types import Completion

MAX_CONNECTIONS = 4096
BACKLOG = 1024  # connections that wait while a wave is sampled
MAX_BODY = 4_000_000  # bytes of a request
MAX_UNREAD = 16_000_000  # bytes read of a longer request, so that its client sees the reply
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Episode:
    key: str
    running: RunningEpisode
    written: chat.Written = field(default_factory=chat.Written)


class Endpoint:
    """The server of all episodes of a rollout; it is closed together with their event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Initialize a server that answers while ``loop`` runs. Any thread may call ``open``."""
        self._loop = loop
        self._episodes: dict[str, _Episode] = {}  # by path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # None until an address is requested
        self._server: uvicorn.Server | None = None
        self._starting: asyncio.Task[None] | None = None

    def open(self, running: RunningEpisode) -> Address:
        """Return an address with a new path and key for an episode; start the server if needed."""
        with self._lock:
            if self._socket is None:
                _pass_proxies()
                self._socket = socket.create_server((HOST, 0), backlog=BACKLOG)
                self._loop.call_soon_threadsafe(self._start, self._socket)
        path, key = secrets.token_hex(8), secrets.token_hex(16)
        self._episodes[path] = _Episode(key, running)
        return Address(f"http://{HOST}:{self._socket.getsockname()[1]}/{path}/v1", key)

    def _start(self, listening: socket.socket) -> None:
        routes = [
            Route("/{path}/v1/models", self._models, methods=["GET"]),
            Route("/{path}/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/{path}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/{path}/{rest:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={HTTPException: _refusal}),
            http="h11", ws="none", lifespan="off", log_config=None, log_level="critical",
            access_log=False, backlog=BACKLOG, limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=3600, date_header=False, server_header=False,
        )  # fmt: skip
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        # Not ``serve``: it replaces the signal handlers and wakes the loop ten times a second.
        self._starting = self._loop.create_task(self._server.startup(sockets=[listening]))

    def close(self) -> None:
        """Stop accepting connections; open ones end in the next iteration of the event loop."""
        if self._server is not None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            for listener in getattr(self._server, "servers", ()):
                listener.close()
        if self._socket is not None:
            self._socket.close()

    def _episode(self, request: Request) -> _Episode:
        episode = self._episodes.get(request.path_params["path"])
        header = dict(request.scope["headers"]).get(b"authorization", b"")
        expected = f"Bearer {episode.key if episode else ''}".encode()
        if not secrets.compare_digest(header, expected) or episode is None:
            raise HTTPException(401, "no episode with this path and this key")
        return episode

    async def _unknown(self, request: Request) -> Response:
        self._episode(request)
        raise HTTPException(404, "there are POST chat/completions and GET models here")

    async def _models(self, request: Request) -> Response:
        names = self._episode(request).running.program.names_N
        return _json({"object": "list", "data": list(map(_model_card, names))})

    async def _model(self, request: Request) -> Response:
        running, name = self._episode(request).running, request.path_params["model"]
        _index(running, name)
        return _json(_model_card(name))

    async def _chat(self, request: Request) -> Response:
        """Answer a request for chat completions: each choice is a call of the episode."""
        episode = self._episode(request)  # authenticate before reading the body
        try:
            body = await _body(request)
            chat_request, reply = await _unless_gone(request, self._reply(episode, body))
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone
        if chat_request.stream:
            events = chat.chunks(reply, chat_request.stream_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return _json(reply)

    async def _reply(
        self, episode: _Episode, body: bytes
    ) -> tuple[chat.ChatRequest, dict[str, Any]]:
        try:
            return await _completions(episode, _parsed(body))
        except HTTPException:
            raise
        except (ValueError, EpisodeError, UserError) as error:
            raise HTTPException(400, one_line(str(error), 600)) from error
        except Exception as error:  # a bug of ours: the client gets one line
            self._loop.call_exception_handler(
                {"message": "the endpoint cannot answer a request", "exception": error}
            )
            reason = one_line(f"{type(error).__name__}: {error}")
            raise HTTPException(500, reason) from error


def _pass_proxies() -> None:
    """Make clients in this process and its children bypass any proxy set in the environment."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    listed = [host.strip() for host in hosts.split(",") if host.strip()]
    if not {HOST, "*"} & set(listed):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*listed, HOST])


async def _body(request: Request) -> bytes:
    """Read a request's body. Raises HTTPException if it is longer than ``MAX_BODY``.

    Up to ``MAX_UNREAD`` bytes are read first, since closing with unread input loses the reply.
    """
    body, length = bytearray(), 0
    async for part in request.stream():
        length += len(part)
        if length <= MAX_BODY:
            body += part
        elif length > MAX_UNREAD:
            break
    if length > MAX_BODY:
        raise HTTPException(413, f"a request may hold at most {MAX_BODY} bytes")
    return bytes(body)


async def _unless_gone(request: Request, reply: Coroutine[Any, Any, Any]) -> Any:
    """Return a reply once it is ready. Raises ClientDisconnect if the client leaves before."""
    answering = asyncio.ensure_future(reply)
    leaving = asyncio.ensure_future(request.receive())  # the body has been read
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _completions(
    episode: _Episode, body: Mapping[str, Any]
) -> tuple[chat.ChatRequest, dict[str, Any]]:
    running, model = episode.running, body.get("model", "")
    agent = _index(running, model)
    request = chat.read_request(body, running.settings.sampling.for_agent(agent), episode.written)
    calls = (running.call(agent, request.prompt, request.stop) for _ in range(request.count))
    drawn = await _all(*calls)
    read = len(running.context.encode(agent, request.prompt))
    tokens = {token for c in drawn for token in c.token_ids} if request.logprobs else ()
    texts = running.settings.sampler.token_texts(agent, list(tokens))
    texts_of = dict(zip(tokens, texts, strict=True))
    return request, chat.reply(request, model, drawn, read, texts_of, episode.written)


def _index(running: RunningEpisode, name: Any) -> int:
    try:
        return running.program.index(name if isinstance(name, str) else chat.shown(name))
    except UnknownAgent as error:
        raise HTTPException(404, f"model: {one_line(str(error), 600)}") from error


async def _all(*calls: Coroutine[Any, Any, Completion]) -> list[Completion]:
    """Return all completions. If a call fails or this task is cancelled, withdraw the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the body is not JSON") from error
    if not isinstance(parsed, Mapping):
        raise HTTPException(400, "the body is not a JSON object")
    return parsed


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "comlrl"}


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return _json({"error": {"message": error.detail, "type": kind, "code": None}},
                 error.status_code)  # fmt: skip
