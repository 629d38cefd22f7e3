"""Chat completions of an OpenAI-compatible service, with limits on time, size and attempts.

Answers are untrusted text, which the caller must clean and truncate.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from comlrl.errors import UserError
from comlrl.quoting import one_line, without_surrogates

MAX_BODY = 1 << 20  # bytes of an answer that are read
RETRIED = frozenset({408, 409, 425, 429})  # statuses of temporary errors, besides all ≥ 500
LONGEST_WAIT = 60.0  # seconds before an attempt, whatever the service asks for
MAX_TOKENS = 1 << 31  # greatest count that is accepted in ``usage``


class Answer(NamedTuple):
    """A completion, and the service's token counts; None if it reports none."""

    text: str
    finished: bool  # False: cut at the limit
    prompt_tokens: int | None
    completion_tokens: int | None


class ApiFailure(Exception):
    """A failed request. ``setup``: the service refuses the key, the model or the address."""

    def __init__(self, reason: str, setup: bool = False) -> None:
        super().__init__(reason)
        self.setup = setup


def key_of(variable: str) -> str | None:
    """Return the key in an environment variable, without surrounding white space; None if unset.

    Raises UserError, which does not show the key, if it cannot be in an HTTP header.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"the environment variable {variable} contains characters that no key has, such as a "
            "line break; set it again"
        )
    return key or None


class _TryAgain(Exception):
    """A temporary failure. ``wait``: seconds that the service asks to wait."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class ApiClient:
    """A client of one service; its coroutines run in one event loop."""

    def __init__(
        self,
        base_url: str,
        key: str | None,
        *,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
    ) -> None:
        """Initialize the client.

        ``timeout``: seconds for one attempt, its complete answer included. ``backoff``: seconds
        before the first retry; doubled for each further one. Raises ValueError for a malformed
        address or key.
        """
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._key = key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._url = httpx.URL(f"{base_url.rstrip('/')}/chat/completions")
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=min(timeout, 10.0)),
                limits=httpx.Limits(max_connections=None),
                follow_redirects=False,  # a redirect would receive the key
            )
        except httpx.InvalidURL as error:
            raise ValueError(str(error)) from error

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]
    ) -> Answer:
        """Return one completion. Raises ApiFailure if the service refuses or all retries fail."""
        body = {"messages": messages, **parameters}
        for attempt in range(self.retries + 1):
            try:
                return await asyncio.wait_for(self._attempt(body), self.timeout)
            except asyncio.TimeoutError:
                reason, wait = f"no complete answer within {self.timeout:g} s", 0.0
            except _TryAgain as failure:
                reason, wait = str(failure), failure.wait
            if attempt < self.retries:
                await asyncio.sleep(min(max(wait, self.backoff * 2**attempt), LONGEST_WAIT))
        raise ApiFailure(f"{reason} ({self.retries + 1} requests)")

    async def _attempt(self, body: Mapping[str, Any]) -> Answer:
        content = bytearray()
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MAX_BODY:
                        raise ApiFailure(f"the answer exceeds {MAX_BODY} bytes")
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise _TryAgain(self._shown(f"{type(error).__name__}: {error}")) from error
        if response.status_code != 200:
            self._refused(response, bytes(content))
        return _answer(bytes(content))

    def _refused(self, response: httpx.Response, content: bytes) -> None:
        """Raise the failure for an error status."""
        status = response.status_code
        reason = self._shown(f"HTTP {status}: {content[:2000].decode(errors='replace')}")
        if status in RETRIED or status >= 500:
            wait = response.headers.get("Retry-After", "")
            raise _TryAgain(reason, float(wait) if wait.isascii() and wait.isdecimal() else 0.0)
        raise ApiFailure(reason, setup=status < 400 or status in (401, 403, 404))

    def _shown(self, text: str) -> str:
        """Return a service's text in one line, without the key."""
        return one_line(text.replace(self._key, "…") if self._key else text)


def _answer(content: bytes) -> Answer:
    """Read a chat completion. Raises _TryAgain for anything else."""
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        text, finished = choice["message"]["content"], choice.get("finish_reason") != "length"
        usage = reply.get("usage")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _TryAgain("the answer is not a chat completion") from error
    if not isinstance(text, str):
        raise _TryAgain("the answer is empty")
    counts = usage if isinstance(usage, dict) else {}
    read, new = (_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    return Answer(without_surrogates(text), finished, read, new)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
