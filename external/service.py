"""Client of a model behind an OpenAI-compatible service, for one question at a time.

Answers are untrusted text: they are read up to a limit, and callers must clean and truncate them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from comlrl.errors import UserError
from comlrl.rollout import background
from comlrl.rollout.api_client import ApiClient, ApiFailure, key_of

MAX_TOKENS = 1024  # requested from the service


class Provider(NamedTuple):
    """A service with a known address and key variable."""

    models: str  # pattern of its models' names
    base_url: str
    key: str  # environment variable
    limit: str = "max_tokens"  # the request's field for MAX_TOKENS


PROVIDERS = (
    Provider(r"deepseek", "https://api.deepseek.com", "DEEPSEEK_API_KEY"),
    Provider(r"claude", "https://api.anthropic.com/v1/", "ANTHROPIC_API_KEY"),
    Provider(r"gpt-|o\d", "https://api.openai.com/v1", "OPENAI_API_KEY", "max_completion_tokens"),
)
OTHER_KEY = "EXPERT_API_KEY"  # for any other address; may be unset, since local servers need none


class ExpertError(UserError):
    """The expert gave no usable answer; the message states the request and the failure."""

    exit_code = 1


def provider_of(model: str, base_url: str | None) -> Provider:
    """Return the provider of ``external.expert_model``, with the variable that holds its key.

    A known provider's key is sent only to that provider's host. Raises UserError if the address is
    malformed, or missing and not implied by the model's name.
    """
    if base_url is not None:
        try:
            host = urlsplit(base_url).hostname
        except ValueError as error:
            raise UserError(
                f"external.expert_base_url: '{base_url}': {error}; set an address"
            ) from error
        for provider in PROVIDERS:
            if host == urlsplit(provider.base_url).hostname:
                return provider._replace(base_url=base_url)
        return Provider("", base_url, OTHER_KEY)
    for provider in PROVIDERS:
        if re.match(provider.models, model):
            return provider
    raise UserError(
        "external.expert_base_url: null, and no provider is known for external.expert_model "
        f"{model!r}; set the address of its service"
    )


class Service:
    """Answers questions. Raises UserError if the provider's key is unset or its address invalid."""

    def __init__(
        self,
        model: str,
        provider: Provider,
        user: str,  # the setting that needs the service, for error messages
        **client: Any,  # passed to ``ApiClient``
    ) -> None:
        self.model, self.url, self._limit = model, provider.base_url, provider.limit
        key = key_of(provider.key)
        if key is None and provider.key != OTHER_KEY:
            raise UserError(
                f"{user} with {provider.base_url} needs the environment variable {provider.key}; "
                "set it"
            )
        try:
            self._client = ApiClient(provider.base_url, key, **client)
        except ValueError as error:
            raise UserError(f"{user} with {provider.base_url}: {error}; set an address") from error

    def ask(self, question: str) -> str:
        """Return the answer. Raises ExpertError if there is no usable one after some retries."""
        messages = [{"role": "user", "content": question}]
        parameters = {"model": self.model, self._limit: MAX_TOKENS}
        try:
            answer = background.submit(self._client.complete(messages, parameters)).result()
        except ApiFailure as failure:
            raise ExpertError(str(failure)) from failure
        if not answer.text.strip():
            raise ExpertError("the answer is empty")
        if question.strip() in answer.text:
            raise ExpertError("the answer repeats the request; check the server's chat template")
        return answer.text
