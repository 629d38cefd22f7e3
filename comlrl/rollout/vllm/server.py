"""A vLLM server, in a separate process and environment, reached over HTTP.

It must have been started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` (docs/scaling.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import ssl
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from comlrl.errors import UserError
from comlrl.rollout.background import submit
from comlrl.rollout.vllm.replies import (
    KEY,
    MAX_REPLY,
    ROUNDING,
    BadReply,
    Refused,
    ServerError,
    Unanswered,
    base_model,
    completions,
    model_names,
)

SHORT = 10.0  # seconds for a connection, and for answers that need no computation
FIRST = 300.0  # seconds for the first token, for which kernels may be compiled
GENERATE = "/inference/v1/generate"  # takes and returns token ids, and what truncation left


class Late(Unanswered):
    """The time for the answer is over."""


class Server:
    """One server. Its coroutines run in the clients' event loop; ``check`` and ``check_replay`` are
    called from other threads."""

    def __init__(self, url: str) -> None:
        """Initialize. ``url``: without ``/v1`` or a final slash. Raises UserError for a malformed
        one.
        """
        self.url = url
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            self._client = httpx.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=SHORT),
                # A new connection for each request: an idle one may be closed as it is used.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=ssl.create_default_context() if url.startswith("https") else False,
                follow_redirects=False,  # the key would go with it
                trust_env=False,  # a proxy leads outside
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{KEY}: '{url}' is not an address ({error})") from error

    def check(self) -> tuple[str, int | None]:
        """Return the base model's name, and the tokens that the server holds, where it reports
        them. Raises UserError where it cannot be reached."""
        try:
            return base_model(self.url, submit(self.ask("/v1/models")).result())
        except BadReply as error:
            raise UserError(str(error)) from error
        except (Unanswered, Refused) as error:
            raise UserError(
                f"{KEY}: '{self.url}' cannot be reached ({error.reason}); start the server "
                "(docs/scaling.md), or set generation.backend=builtin"
            ) from error

    def check_replay(self, base: str) -> None:
        """Raise UserError where it does not return the tokens that survive truncation, with
        log-probabilities over these alone: of one survivor that is 0."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        body = {"model": base, "token_ids": [0], "sampling_params": params}
        try:
            reply = submit(self.ask(GENERATE, body, FIRST)).result()
            (drawn,) = completions(
                self.url, reply, count=1, max_tokens=1, vocabulary=sys.maxsize, support=True
            )
        except (Unanswered, Refused, BadReply) as error:
            raise UserError(
                f"'{self.url}' does not return the tokens that survive it ({error.reason}); "
                "start it with --enable-scale-out --return-sampling-mask (docs/scaling.md)"
            ) from error
        if abs(sum(drawn.logprob_L)) > ROUNDING:
            raise UserError(
                f"'{self.url}' gives log-probabilities over all tokens; start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def names(self) -> list[str]:
        """Return all that requests may name. Raises as ``ask`` does."""
        return model_names(self.url, await self.ask("/v1/models"))

    async def load(self, adapters: Mapping[str, str], seconds: float) -> None:
        """Load adapters, name → folder, unless they are there. Raises as ``ask`` does."""
        for name, path in adapters.items():
            try:
                adapter = {"lora_name": name, "lora_path": path}
                await self.ask("/v1/load_lora_adapter", adapter, seconds)
            except Refused:
                if name not in await self.names():  # another request may have been first
                    raise

    async def unload(self, names: Iterable[str]) -> None:
        """Unload adapters, unless they are gone or the server is."""
        for name in names:
            with contextlib.suppress(ServerError):
                await self.ask("/v1/unload_lora_adapter", {"lora_name": name})

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = SHORT,
        most: int = MAX_REPLY,
    ) -> Any:
        """Return the answer to a GET, or with a body to a POST. The complete answer has
        ``seconds``, and at most ``most`` bytes. Raises Unanswered, Refused and BadReply, and
        ServerError where this process has too many files open."""
        try:
            response, text = await asyncio.wait_for(self._exchange(path, body, most), seconds)
        except asyncio.TimeoutError:
            raise Late(self.url, f"no complete answer within {seconds:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            causes = list(_causes(error))
            for cause in causes:
                if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                    raise ServerError(  # no reason to leave the server out
                        f"{KEY}: '{self.url}': no connection, {cause.strerror}; raise `ulimit -n`"
                    ) from error
            reason = f"{type(causes[-1]).__name__}: {causes[-1]}"
            raise Unanswered(self.url, reason) from error
        if response.status_code >= 300:
            raise Refused(self.url, response.status_code, _reason(response, text))
        if len(text) > most:
            raise BadReply(self.url, f"more than {most} bytes")
        if not text.startswith((b"{", b"[")):  # loading and unloading are answered by a sentence
            return text.decode(errors="replace")
        try:
            return json.loads(text)
        except RecursionError:
            raise BadReply(self.url, "JSON that is nested too deep") from None
        except ValueError as error:
            raise Unanswered(self.url, f"not JSON: {error}") from error

    async def _exchange(
        self, path: str, body: Mapping[str, Any] | None, most: int
    ) -> tuple[httpx.Response, bytes]:
        """Return a response and its body, which is left where it is longer than ``most``."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        text = bytearray()
        async with self._client.stream(method, path, content=content) as response:
            async for part in response.aiter_raw():
                text += part
                if len(text) > most:
                    break
        return response, bytes(text)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and what it was raised from, the first attempt of several."""
    while error is not None:
        yield error
        attempts = getattr(error, "exceptions", ())  # of an ExceptionGroup
        error = attempts[0] if attempts else error.__cause__ or error.__context__


def _reason(response: httpx.Response, text: bytes) -> str:
    """Return what an error's body says, or why a redirect is an error."""
    if response.has_redirect_location:
        where = response.headers["Location"]
        return f"a redirect to '{where}', which is not followed; give that address instead"
    message: Any = text.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(message)
        if isinstance(reply, dict):
            error = reply.get("error", reply)
            message = error.get("message", message) if isinstance(error, dict) else message
    return str(message) or response.reason_phrase
