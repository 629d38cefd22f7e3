"""A vLLM server, in a separate process and environment, reached over HTTP.

It must have been started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` (docs/scaling.md).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from comlrl.errors import UserError
from comlrl.quoting import one_line
from comlrl.rollout.vllm_replies import (
    KEY,
    MAX_REPLY,
    BadReply,
    ServerError,
    base_model,
    model_names,
)

FIRST_ASK = 10.0  # seconds in which a server must answer at a run's start
RETRIED = frozenset({408, 429})  # beside every status ≥ 500
LONGEST_WAIT = 30.0  # seconds between two tries


class Refused(ServerError):
    """The server has answered with an error, ``status``."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{KEY}: '{url}' answers HTTP {status}: {one_line(reason)}")
        self.status, self.reason = status, reason


class _TryAgain(Exception):
    """No connection, or none to the end of the answer."""


class Server:
    """Asks and, where an answer does not come, asks again; may be used by several threads."""

    def __init__(self, url: str, patience: float, first_wait: float = 1.0) -> None:
        """``patience``: seconds without any answer after which the server is given up.
        ``first_wait``: seconds before the first retry; doubled for each further one."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.patience, self.first_wait = patience, first_wait
        self._leaving = threading.Event()

    def check(self) -> tuple[str, int | None]:
        """Name of the base model, and the tokens that the server holds, where it says so. Raises
        UserError where it cannot be reached."""
        try:
            return base_model(self.url, self._once("/v1/models", None, FIRST_ASK))
        except BadReply as error:
            raise UserError(str(error)) from error
        except (_TryAgain, Refused) as error:
            reason = error.reason if isinstance(error, Refused) else str(error)
            raise UserError(
                f"{KEY}: '{self.url}' cannot be reached ({reason}); start the server "
                "(docs/scaling.md), or set generation.backend=builtin"
            ) from error

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        tries: bool = True,
        most: int = MAX_REPLY,
    ) -> Any:
        """The answer to a GET, or with a body to a POST. Raises ServerError where none has come
        from the first failure on for ``patience`` seconds, Refused, and BadReply. ``tries``: an
        error of the server's own may pass. ``most``: bytes of the answer."""
        wait, limit = self.first_wait, None
        while True:
            timeout = FIRST_ASK if self.left else self.patience
            try:
                return self._once(path, body, timeout, most)
            except Refused as error:
                if not tries or (error.status < 500 and error.status not in RETRIED):
                    raise
                failure = str(error)
            except _TryAgain as error:
                failure = f"{KEY}: '{self.url}': {error}"
            limit = limit or time.monotonic() + self.patience
            left = limit - time.monotonic()
            if left <= 0 or self._leaving.wait(min(wait, left)):
                raise ServerError(f"{failure}, and no better for {self.patience:g} s")
            wait = min(2 * wait, LONGEST_WAIT)

    def load(self, name: str, path: str) -> None:
        """Load an adapter, unless it is there. Raises Refused."""
        try:
            adapter = {"lora_name": name, "lora_path": path}
            self.ask("/v1/load_lora_adapter", adapter, tries=False)
        except Refused:
            if name not in model_names(
                self.url, self.ask("/v1/models")
            ):  # another process may have been first
                raise

    def leave(self) -> None:
        """Nothing is waited for any more."""
        self._leaving.set()

    @property
    def left(self) -> bool:
        return self._leaving.is_set()

    def _once(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        seconds: float,
        most: int = MAX_REPLY,
    ) -> Any:
        """One request, whose whole answer has ``seconds``. No redirect is followed, as the key
        would go with it; no proxy of the environment's is asked, as it leads outside."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        try:
            connection = kind(parts.netloc, timeout=seconds)
            with contextlib.closing(connection), _connected(connection, seconds):
                method = "GET" if data is None else "POST"
                connection.request(method, parts.path + path, data, headers)
                with connection.getresponse() as answer:
                    text = answer.read(most + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _TryAgain(one_line(f"{type(error).__name__}: {error}")) from error
        if answer.status >= 300:
            where = answer.getheader("Location") if answer.status < 400 else None
            raise Refused(self.url, answer.status, _reason(text, where) or answer.reason)
        if len(text) > most:
            raise BadReply(self.url, f"more than {most} bytes")
        if answer.length:  # which ``read`` with a limit does not mind
            raise _TryAgain(f"{answer.length} bytes of the answer are missing")
        if not text.startswith((b"{", b"[")):  # loading and unloading are answered by a sentence
            return text.decode(errors="replace")
        try:
            return json.loads(text)
        except RecursionError:
            raise BadReply(self.url, "JSON that is nested too deep") from None
        except ValueError as error:
            raise _TryAgain(one_line(f"not JSON: {error}")) from error


@contextlib.contextmanager
def _connected(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Connects, and cuts the connection after ``seconds``: a socket's own timeout begins anew at
    every byte. Raises _TryAgain where that was too early for what is done within."""
    passed = threading.Event()
    sock: socket.socket | None = None  # the connection forgets its own before the body is read

    def cut() -> None:
        passed.set()
        open_socket = sock or connection.sock
        if open_socket is not None:
            with contextlib.suppress(OSError):  # of the plain socket: TLS would wait for an answer
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        sock = connection.sock
        if not passed.is_set():
            yield
    except (OSError, http.client.HTTPException):
        if not passed.is_set():
            raise
    finally:
        timer.cancel()
    if passed.is_set():
        raise _TryAgain(f"no whole answer within {seconds:g} s")


def _reason(text: bytes, redirect: str | None) -> str:
    """What an error's body says, or why a redirect is one."""
    if redirect is not None:
        return f"a redirect to '{redirect}', which is not followed; give that address instead"
    message: Any = text.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(message)
        if isinstance(reply, dict):
            error = reply.get("error", reply)
            message = error.get("message", message) if isinstance(error, dict) else message
    return str(message)
