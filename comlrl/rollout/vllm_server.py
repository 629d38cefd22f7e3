"""A vLLM server, in a process and an environment of its own, spoken to over HTTP.

It must have been started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` (docs/scaling.md).
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from comlrl.errors import UserError

KEY = "generation.vllm_url"
FIRST_ASK = 10.0  # seconds in which a server must answer at a run's start
RETRIED = frozenset({408, 429})  # beside every status ≥ 500
LONGEST_WAIT = 30.0  # seconds between two tries


class ServerError(UserError):
    """The server is of no more use: it has not answered for too long, or not as it should."""

    exit_code = 1


class Refused(ServerError):
    """The server has answered with an error, ``status``."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{KEY}: '{url}' answers HTTP {status}: {reason}")
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
        # A proxy of the environment's leads outside, where no such server is.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._leaving = threading.Event()

    def check(self) -> Mapping[str, Any]:
        """The base model, as the server describes it. Raises UserError where it cannot be
        reached."""
        try:
            return self._once("/v1/models", None, FIRST_ASK)["data"][0]
        except (_TryAgain, Refused, LookupError, TypeError) as error:
            reason = error.reason if isinstance(error, Refused) else str(error)
            raise UserError(
                f"{KEY}: '{self.url}' cannot be reached ({reason}); start the server "
                "(docs/scaling.md), or set generation.backend=builtin"
            ) from error

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, tries: bool = True) -> Any:
        """The answer to a GET, or with a body to a POST. Raises ServerError where none has come
        from the first failure on for ``patience`` seconds, and Refused. ``tries``: an error of
        the server's own may pass."""
        wait, limit = self.first_wait, None
        while True:
            timeout = FIRST_ASK if self.left else self.patience
            try:
                return self._once(path, body, timeout)
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
            cards = self.ask("/v1/models")["data"]
            if name not in [card["id"] for card in cards]:  # another process may have been first
                raise

    def leave(self) -> None:
        """Nothing is waited for any more."""
        self._leaving.set()

    @property
    def left(self) -> bool:
        return self._leaving.is_set()

    def _once(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                text = answer.read()
            # Loading and unloading are answered by a sentence.
            return json.loads(text) if text[:1] in (b"{", b"[") else text.decode()
        except urllib.error.HTTPError as error:
            raise Refused(self.url, error.code, _reason(error)) from error
        except urllib.error.URLError as error:
            raise _TryAgain(str(error.reason)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    """What an error's body says, in a line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        told = json.loads(text)
        text = told.get("error", told).get("message", text)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300]
