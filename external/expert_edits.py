"""``expert_edits``: an external model proposes compact edits for each agent's part.

The expert is reached through the ``openai`` client, so any OpenAI-compatible service will do. It
reads the problem and the attempt alone. What it answers is untrusted text: read up to a
limit, cleaned of control and special tokens, cut to size, quoted to the agents, never run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from comlrl.config.sections import ConfigError
from comlrl.tasks.prompts import Prompts
from comlrl.tasks.quoting import clean, cut
from comlrl.types import Attempt, Transition

MAX_BODY = 262_144  # bytes of an answer that are read
MAX_EDIT = 800  # characters of an agent's edits that are quoted
MAX_TOKENS = 1024  # asked of the service
RETRIED = frozenset({408, 409, 425, 429})  # beside every status ≥ 500

REQUEST = """\
These parts are written by different agents and stand together as one piece of work.

Problem:
{problem}

{parts}

Propose the smallest edits that make the whole right and its parts fit each other. Answer with \
one section for each of {names}: its name in brackets on a line of its own, like [{last}], then \
at most five lines of edits, or "none". Nothing else.
"""


class Provider(NamedTuple):
    """A service whose address and key are known without being told."""

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


class ExpertError(RuntimeError):
    """The expert could not be had; the message says what it was asked and what came back."""

    user_error, exit_code = True, 1  # told in one line


class _TryAgain(Exception):
    """A failure that may pass: no connection, a timeout, an overloaded service, no answer."""


def provider_of(model: str, base_url: str | None) -> Provider:
    """Where ``external.expert_model`` is served, and which variable holds the key.

    A known provider's key is sent to that provider's host alone. Raises ConfigError where the
    address is not given and cannot be told from the model's name.
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
    raise ConfigError(
        f"external.expert_base_url: null, and no provider is known for external.expert_model "
        f"{model!r}; give the address of its service"
    )


@dataclass
class Fallbacks:
    """Attempts that ``plain`` answered in the expert's place."""

    count: int = 0


class ExpertEdits:
    """Asks the expert about each attempt and tells each agent the edits to its own part.

    ``fallbacks`` counts the attempts that were answered by ``plain`` instead (``on_error:
    plain``). With ``on_error: stop`` the first failure raises ExpertError. Raises ConfigError
    where the provider's key is not in the environment.
    """

    def __init__(
        self,
        prompts: Prompts,
        model: str,
        base_url: str | None,
        on_error: Literal["stop", "plain"],
        plain: Transition,
        *,
        fallbacks: Fallbacks | None = None,
        timeout: float = 60.0,  # seconds for one request, its whole answer included
        retries: int = 3,
        backoff: float = 1.0,  # seconds before the first retry; doubled for each further one
        max_in_flight: int = 4,
    ) -> None:
        try:
            import openai
        except ImportError:
            raise ConfigError(
                "external.mode: 'expert_edits' needs it: pip install openai (the extra `expert`)"
            ) from None
        self.prompts, self.fallbacks = prompts, fallbacks or Fallbacks()
        self._model, self._on_error, self._plain = model, on_error, plain
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        self._max_in_flight = max_in_flight
        self._provider = provider_of(model, base_url)
        key = os.environ.get(self._provider.key) or None
        if key is None and self._provider.key != OTHER_KEY:
            raise ConfigError(
                f"external.mode: 'expert_edits' with {self._provider.base_url} needs the "
                f"environment variable {self._provider.key}; set it"
            )
        self._client = openai.OpenAI(
            api_key=key or "none",
            base_url=self._provider.base_url,
            timeout=timeout,
            max_retries=0,  # retried here, so that a broken body is retried too
        )
        # Errors while a body is read come raw from the client's HTTP library (httpx or httpx2).
        library = openai.DefaultHttpxClient.__base__.__module__.partition(".")[0]
        self._transport: Any = importlib.import_module(library)

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
        with ThreadPoolExecutor(self._max_in_flight) as pool:
            answers = [pool.submit(self._edits, attempt) for attempt in attempts]
            try:
                return [
                    self._texts(attempt, answer.result())
                    for attempt, answer in zip(attempts, answers, strict=True)
                ]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _texts(self, attempt: Attempt, edits: tuple[str, ...] | None) -> tuple[str, ...]:
        if edits is None:
            self.fallbacks.count += 1
            return self._plain([attempt])[0]
        return tuple(
            f"{_proposal(name, text)}\n{revision}"
            for name, text, revision in zip(
                self.prompts.parts(attempt), edits, self.prompts.revision_N(attempt), strict=True
            )
        )

    def _edits(self, attempt: Attempt) -> tuple[str, ...] | None:
        """Each agent's edits; None where the expert could not be had and ``plain`` is to serve."""
        question = request(self.prompts, attempt)
        for tried in range(self._retries + 1):
            try:
                return split_edits(self._ask(question), self.prompts.parts(attempt))
            except _TryAgain as failure:
                if tried < self._retries:
                    time.sleep(self._backoff * 2**tried)
                    continue
                reason = f"{failure} ({tried + 1} requests)"
            except ExpertError as failure:
                reason = str(failure)
            break
        if self._on_error == "plain":
            return None
        raise ExpertError(
            f"no edits from the expert {self._model!r} at {self._provider.base_url} for "
            f"{attempt.task.task_id!r}: {reason}; check external.expert_model, "
            "external.expert_base_url and the key, or set external.on_error to 'plain'"
        )

    def _ask(self, question: str) -> str:
        """One request. Raises _TryAgain or, where asking again is of no use, ExpertError."""
        import openai

        deadline = time.monotonic() + self._timeout
        try:
            with self._client.chat.completions.with_streaming_response.create(
                model=self._model,
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
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        text = _content(bytes(body))
        if question.strip() in text:
            raise ExpertError("the answer repeats the request; check the server's chat template")
        return text


def request(prompts: Prompts, attempt: Attempt) -> str:
    """What the expert is asked: the problem and each agent's text, without what scores them."""
    names = prompts.parts(attempt)
    question = REQUEST.format(
        problem=prompts.domain.problem(attempt.task),
        parts="\n\n".join(
            f"[{name}]\n{text.strip() or '(empty)'}"
            for name, text in zip(names, attempt.completions_N, strict=True)
        ),
        last=names[-1],
        names=", ".join(f"`{name}`" for name in names),
    )
    return clean(question)


def split_edits(answer: str, names: Sequence[str]) -> tuple[str, ...]:
    """Each agent's part of an answer, cleaned and cut; "" for an agent that has none.

    A section starts at a line that holds a name alone, decorated (``[name]``, ``### `name` ``,
    ``**name**``) or not, or a name and a colon. Fences are left out, and names inside them start
    nothing. An answer without any section is about the whole and goes to every agent.
    """
    listed = "|".join(map(re.escape, names))
    heading = re.compile(rf"[\s#>*_\[`-]*({listed})(?:\(\))?[\]`*_]*\s*(?::[*_]*\s*(.*))?$")
    parts: dict[str, list[str]] = {}
    loose: list[str] = []
    into, fenced = loose, False
    for line in clean(answer).split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        found = None if fenced else heading.match(line)
        if found:
            into = parts.setdefault(found[1], [])
            line = found[2] or ""
        into.append(line.rstrip())
    sections = [parts.get(name, []) for name in names] if parts else [loose] * len(names)
    return tuple(cut("\n".join(lines).strip("\n"), MAX_EDIT) for lines in sections)


def _proposal(name: str, edits: str) -> str:
    if not edits.strip() or edits.strip(" .").lower() == "none":
        return f"Feedback:\nAn expert proposes no edits to `{name}`."
    return f"Feedback:\nAn expert proposes for `{name}`:\n{edits}"


def _content(body: bytes) -> str:
    """The message's text in a chat completion; raises _TryAgain where there is none."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _TryAgain("the answer is not a chat completion") from error
    if not isinstance(text, str) or not text.strip():
        raise _TryAgain("the answer is empty")
    return text
