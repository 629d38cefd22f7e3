"""A model behind an OpenAI-compatible service, reached through the ``openai`` client.

What it answers is untrusted text: read up to a limit, and for its users to clean and to cut.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from comlrl.errors import UserError
from comlrl.quoting import one_line

MAX_BODY = 262_144  # bytes of an answer that are read
MAX_TOKENS = 1024  # asked of the service
RETRIED = frozenset({408, 409, 425, 429})  # beside every status ≥ 500


class Provider(NamedTuple):
    """A service whose address and key variable are known."""

    models: str  # pattern of its models' names
    base_url: str
    key: str  # environment variable
    limit: str = "max_tokens"  # the request's field for MAX_TOKENS


PROVIDERS = (
    Provider(r"deepseek", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    Provider(r"claude", "https://api.anthropic.com/v1/", "ANTHROPIC_API_KEY"),
    Provider(r"gpt-|o\d", "https://api.openai.com/v1", "OPENAI_API_KEY", "max_completion_tokens"),
)
OTHER_KEY = "EXPERT_API_KEY"  # for every other address; may be unset, as local servers need none


class ExpertError(UserError):
    """The expert could not be had; the message says what it was asked and what came back."""

    exit_code = 1


class _TryAgain(Exception):
    """A failure that may pass: no connection, a timeout, an overloaded service, no answer."""


def provider_of(model: str, base_url: str | None) -> Provider:
    """Where ``external.expert_model`` is served, and which variable holds the key.

    A known provider's key is sent to that provider's host alone. Raises UserError where the
    address is not given and cannot be inferred from the model's name.
    """
    if base_url is not None:
        host = urlsplit(base_url).hostname
        for known in PROVIDERS:
            if host == urlsplit(known.base_url).hostname:
                return known._replace(base_url=base_url)
        return Provider("", base_url, OTHER_KEY)
    for known in PROVIDERS:
        if re.match(known.models, model):
            return known
    raise UserError(
        f"external.expert_base_url: null, and no provider is known for external.expert_model "
        f"{model!r}; give the address of its service"
    )


class Service:
    """Answers questions; raises UserError where the provider's key is not in the environment."""

    def __init__(
        self,
        model: str,
        provider: Provider,
        user: str,  # the setting that needs it, for that error
        *,
        timeout: float = 60.0,  # seconds for one request, its whole answer included
        retries: int = 3,
        backoff: float = 1.0,  # seconds before the first retry; doubled for each further one
    ) -> None:
        try:
            import openai
        except ImportError:
            raise UserError(f"{user} needs it: pip install openai (the extra `expert`)") from None
        self.model, self._provider = model, provider
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        key = os.environ.get(provider.key) or None
        if key is None and provider.key != OTHER_KEY:
            raise UserError(
                f"{user} with {provider.base_url} needs the environment variable {provider.key}; "
                "set it"
            )
        self._client = openai.OpenAI(
            api_key=key or "none",
            base_url=provider.base_url,
            timeout=timeout,
            max_retries=0,  # retried here, so that a broken body is retried too
            # The question would go to wherever a redirect leads.
            http_client=openai.DefaultHttpxClient(timeout=timeout, follow_redirects=False),
        )
        # Errors while a body is read come raw from the client's HTTP library (httpx or httpx2).
        library = openai.DefaultHttpxClient.__base__.__module__.partition(".")[0]
        self._transport: Any = importlib.import_module(library)

    @property
    def url(self) -> str:
        return self._provider.base_url

    def ask(self, question: str) -> str:
        """The answer. Raises ExpertError where there is none, after some retries."""
        for tried in range(self._retries + 1):
            try:
                return self._once(question)
            except _TryAgain as failure:
                if tried == self._retries:
                    raise ExpertError(f"{failure} ({tried + 1} requests)") from failure
                time.sleep(self._backoff * 2**tried)
        raise AssertionError("the last try returns or raises")

    def _once(self, question: str) -> str:
        """One request. Raises _TryAgain or, where asking again is of no use, ExpertError."""
        import openai

        deadline = time.monotonic() + self._timeout
        try:
            with self._client.chat.completions.with_streaming_response.create(
                model=self.model,
                messages=[{"role": "user", "content": question}],
                extra_body={self._provider.limit: MAX_TOKENS},
            ) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY:
                        raise ExpertError(f"the answer exceeds {MAX_BODY} bytes")
                    if time.monotonic() > deadline:
                        raise _TryAgain(f"no whole answer within {self._timeout:g} s")
        except openai.APIStatusError as error:
            kind = (
                _TryAgain
                if error.status_code in RETRIED or error.status_code >= 500
                else (ExpertError)
            )
            raise kind(f"HTTP {error.status_code}") from error
        except (openai.APIConnectionError, self._transport.HTTPError) as error:
            raise _TryAgain(one_line(f"{type(error).__name__}: {error}")) from error
        text = _content(bytes(body))
        if question.strip() in text:
            raise ExpertError("the answer repeats the request; check the server's chat template")
        return text


def _content(body: bytes) -> str:
    """The message's text in a chat completion; raises _TryAgain where there is none."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _TryAgain("the answer is not a chat completion") from error
    if not isinstance(text, str) or not text.strip():
        raise _TryAgain("the answer is empty")
    return text
