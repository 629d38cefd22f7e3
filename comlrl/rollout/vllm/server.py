"""A vLLM server, in a separate process and environment, reached over HTTP.

It must have been started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` (docs/scaling.md).
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from comlrl.errors import UserError
from comlrl.quoting import one_line
from comlrl.rollout.vllm.replies import (
    KEY,
    MAX_REPLY,
    ROUNDING,
    BadReply,
    ServerError,
    base_model,
    completions,
    model_names,
)

SHORT = 10.0  # seconds for a connection, and for answers that need no computation
FIRST = 300.0  # seconds for the first token, for which kernels may be compiled
GENERATE = "/inference/v1/generate"  # takes and returns token ids, and what truncation left
PASSING = frozenset({408, 429})  # statuses of errors that may pass, beside those from 500 on


class Refused(ServerError):
    """The server has answered with an error, ``status``."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{KEY}: '{url}' answers HTTP {status}: {one_line(reason)}")
        self.status, self.reason = status, reason

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later, or elsewhere."""
        return self.status >= 500 or self.status in PASSING


class Unanswered(Exception):
    """No connection, or none to the end of the answer."""


class Late(Unanswered):
    """The time for the answer is over."""


class Server:
    """One server, which is asked once for each call; may be used by several threads."""

    def __init__(self, url: str) -> None:
        """``url``: without ``/v1`` or a slash at its end."""
        self.url = url
        self._cuts: set[Callable[[], None]] = set()  # of the connections that are open

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""
        return bool(self._cuts)

    def check(self) -> tuple[str, int | None]:
        """Name of the base model, and the tokens that the server holds, where it says so. Raises
        UserError where it cannot be reached."""
        try:
            return base_model(self.url, self.ask("/v1/models"))
        except BadReply as error:
            raise UserError(str(error)) from error
        except (Unanswered, Refused) as error:
            raise UserError(
                f"{KEY}: '{self.url}' cannot be reached ({_short(error)}); start the server "
                "(docs/scaling.md), or set generation.backend=builtin"
            ) from error

    def check_replay(self, base: str) -> None:
        """Raises UserError where it does not return the tokens that survive truncation, with
        log-probabilities over these alone: of one survivor that is 0."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        body = {"model": base, "token_ids": [0], "sampling_params": params}
        try:
            reply = self.ask(GENERATE, body, FIRST)
            (drawn,) = completions(
                self.url, reply, count=1, max_tokens=1, vocabulary=sys.maxsize, support=True
            )
        except (Unanswered, Refused, BadReply) as error:
            raise UserError(
                f"'{self.url}' does not return the tokens that survive it ({_short(error)}); "
                "start it with --enable-scale-out --return-sampling-mask (docs/scaling.md)"
            ) from error
        if abs(sum(drawn.logprob_L)) > ROUNDING:
            raise UserError(
                f"'{self.url}' gives log-probabilities over all tokens; start it with "
                "--logprobs-mode processed_logprobs"
            )

    def names(self) -> list[str]:
        """All that requests may name. Raises as ``ask`` does."""
        return model_names(self.url, self.ask("/v1/models"))

    def load(self, name: str, path: str, seconds: float) -> None:
        """Load an adapter, unless it is there. Raises as ``ask`` does."""
        try:
            adapter = {"lora_name": name, "lora_path": path}
            self.ask("/v1/load_lora_adapter", adapter, seconds)
        except Refused:
            if name not in self.names():  # another process may have been first
                raise

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises as ``ask`` does."""
        self.ask("/v1/unload_lora_adapter", {"lora_name": name})

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = SHORT,
        most: int = MAX_REPLY,
    ) -> Any:
        """The answer to a GET, or with a body to a POST. The whole answer has ``seconds``, and at
        most ``most`` bytes. No redirect is followed, as the key would go with it; no proxy of the
        environment's is asked, as it leads outside. Raises Unanswered, Refused and BadReply, and
        ServerError where this process has too many files open."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        try:
            connection = kind(parts.netloc, timeout=min(seconds, SHORT))
            with contextlib.closing(connection), _connected(connection, seconds, self._cuts):
                method = "GET" if data is None else "POST"
                connection.request(method, parts.path + path, data, headers)
                with connection.getresponse() as answer:
                    text = answer.read(most + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ServerError(  # no fault of the server's, which is not to be left out for it
                    f"{KEY}: '{self.url}': no connection, {error.strerror}; raise `ulimit -n`"
                ) from error
            raise Unanswered(one_line(f"{type(error).__name__}: {error}")) from error
        if answer.status >= 300:
            where = answer.getheader("Location") if answer.status < 400 else None
            raise Refused(self.url, answer.status, _reason(text, where) or answer.reason)
        if len(text) > most:
            raise BadReply(self.url, f"more than {most} bytes")
        if answer.length:  # which ``read`` with a limit does not mind
            raise Unanswered(f"{answer.length} bytes of the answer are missing")
        if not text.startswith((b"{", b"[")):  # loading and unloading are answered by a sentence
            return text.decode(errors="replace")
        try:
            return json.loads(text)
        except RecursionError:
            raise BadReply(self.url, "JSON that is nested too deep") from None
        except ValueError as error:
            raise Unanswered(one_line(f"not JSON: {error}")) from error

    def cut(self) -> None:
        """Cut all connections; whoever waits for an answer gets Unanswered."""
        for cut in list(self._cuts):
            cut()


@contextlib.contextmanager
def _connected(
    connection: http.client.HTTPConnection, seconds: float, cuts: set[Callable[[], None]]
) -> Iterator[None]:
    """Connects, and cuts the connection after ``seconds``: a socket's own timeout begins anew at
    every byte. Raises Unanswered where that was too early for what is done within. ``cuts`` holds
    meanwhile what cuts it earlier."""
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
    cuts.add(cut)
    try:
        connection.connect()
        sock = connection.sock
        sock.settimeout(seconds)
        if not passed.is_set():
            yield
    except (OSError, http.client.HTTPException):
        if not passed.is_set():
            raise
    finally:
        timer.cancel()
        cuts.discard(cut)
    if passed.is_set():
        raise Late(f"no whole answer within {seconds:g} s")


def _short(error: Unanswered | Refused | BadReply) -> str:
    """An error's reason, without the server."""
    if isinstance(error, BadReply):
        return error.what
    return one_line(error.reason) if isinstance(error, Refused) else str(error)


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
