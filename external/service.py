"""A model behind an OpenAI-compatible service, which is asked one question at a time.

What it answers is untrusted text: read up to a limit, and for its users to clean and to cut.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from comlrl.errors import UserError
from comlrl.rollout import background
from comlrl.rollout.api_client import ApiClient, ApiFailure

MAX_TOKENS = 1024  # asked of the service


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


def provider_of(model: str, base_url: str | None) -> Provider:
    """Return the provider of ``external.expert_model`` and the variable that holds its key.

    A known provider's key is sent to that provider's host only. Raises UserError if the address is
    missing and cannot be inferred from the model's name.
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
    """Answers questions; raises UserError where the provider's key is not in the environment."""

    def __init__(
        self,
        model: str,
        provider: Provider,
        user: str,  # the setting that needs it, for that error
        **client: Any,  # as ``ApiClient`` takes it
    ) -> None:
        self.model, self.url, self._limit = model, provider.base_url, provider.limit
        key = os.environ.get(provider.key) or None
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
        """Return the answer. Raises ExpertError where there is none, after some retries."""
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
