"""An agent that an OpenAI-compatible service plays; it is never trained."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from comlrl import files
from comlrl.config.sections import ApiConfig
from comlrl.errors import ServerError, UserError
from comlrl.quoting import one_line
from comlrl.rollout import background
from comlrl.rollout.api_client import Answer, ApiClient, ApiFailure, key_of
from comlrl.types import Completion, Message, Request, Sampler, Sampling

IN_FLIGHT = 16  # requests
MAX_CACHED = 100_000  # answers
MAX_PROMPT = 4_000_000  # bytes
COUNTED = ("calls", "cached", "failed", "prompt_tokens", "completion_tokens")


class ApiError(ServerError):
    """The service no longer plays its agent; the run ends with a checkpoint."""


class ApiMember:
    """Sampler of one agent's completions from a service.

    A service receives messages, not tokens: a prompt's ids are the bytes of its messages as JSON,
    and completions have no ids. ``metrics`` reports the service's token counts.
    """

    def __init__(
        self, role: str, settings: ApiConfig, *, cache: Path | None = None, backoff: float = 1.0
    ) -> None:
        """Initialize the member.

        ``cache``: a file of answers, which only this process writes. A resumed run reads it and the
        other processes' files in its folder. Raises UserError for a missing key and a malformed
        address.
        """
        self.setting = f"agents.{role}.api"
        self.model, self.on_error = settings.model, settings.on_error
        self.base_url = str(settings.base_url)
        host = _host(self.setting, self.base_url)
        key = key_of(settings.key_env) if settings.key_env else None
        if settings.key_env and not key:
            raise UserError(
                f"{self.setting}.key_env: {settings.key_env} is not set in the environment; "
                "export it"
            )
        try:
            self.client = ApiClient(
                self.base_url,
                key,
                timeout=settings.timeout,
                retries=settings.retries,
                backoff=backoff,
            )
        except ValueError as error:
            raise UserError(f"{self.setting}.base_url: {one_line(str(error))}") from error
        newest = host == "api.openai.com"  # whose newest models refuse max_tokens
        self._limit = "max_completion_tokens" if newest else "max_tokens"
        self._cache = AnswerCache(cache)
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._counts: Counter[str] = Counter()  # since ``metrics``

    def encode(self, prompt: Sequence[Message]) -> tuple[int, ...]:
        """Return a prompt's messages as the bytes of JSON."""
        return tuple(json.dumps([(m.role, m.content) for m in prompt]).encode())

    def begin(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Future[list[tuple[Completion, ...]]]:
        """Start sampling one completion per key of each request. The future may raise ApiError."""
        jobs = [self._sample(request, sampling) for request in requests]
        return background.submit(background.gather(jobs))

    def metrics(self) -> dict[str, float]:
        """Return counts since the last call: ``calls`` to the service, ``cached`` and ``failed``
        answers, ``prompt_tokens`` and ``completion_tokens``."""
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in COUNTED}

    async def _sample(self, request: Request, sampling: Sampling) -> tuple[Completion, ...]:
        greedy = sampling.temperature == 0
        keys: Sequence[Any] = [()] if greedy else request.keys_G
        completions = await background.gather(
            self._complete(request.prompt_ids, key, sampling) for key in keys
        )
        return tuple(completions) * (len(request.keys_G) if greedy else 1)

    async def _complete(
        self, prompt_ids: Sequence[int], key: tuple[Any, ...], sampling: Sampling
    ) -> Completion:
        read = json.loads(bytes(prompt_ids))
        messages = [{"role": r, "content": text} for r, text in read if r != "tools"]
        tools = [tool for r, text in read if r == "tools" for tool in json.loads(text)]
        parameters: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            self._limit: sampling.max_new_tokens,
        }
        optional = {"top_p": sampling.top_p, "top_k": sampling.top_k, "tools": tools}
        optional["stop"] = list(sampling.stop)
        parameters |= {name: value for name, value in optional.items() if value}
        request = [self.base_url, messages, parameters, repr(key)]
        digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        answer = self._cache.get(digest)
        self._counts["cached"] += answer is not None
        if answer is None:
            try:
                async with self._slots:
                    self._counts["calls"] += 1
                    answer = await self.client.complete(messages, parameters)
            except ApiFailure as error:
                if error.setup or self.on_error == "stop":
                    raise ApiError(f"{self.setting}: '{self.base_url}': {error}") from error
                self._counts["failed"] += 1
                return _completion(Answer("", True, None, None))
            self._cache.add(digest, answer)
            self._counts["prompt_tokens"] += answer.prompt_tokens or 0
            self._counts["completion_tokens"] += answer.completion_tokens or 0
        return _completion(answer)


def _completion(answer: Answer) -> Completion:
    return Completion(answer.text, (), answer.finished, math.nan)


def _host(setting: str, base_url: str) -> str | None:
    """Return the host of a server's address.

    Raises UserError for any other address, and for one with a password, which the run would store.
    """
    try:
        parts = urlsplit(base_url)
        if parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc:
            return parts.hostname
        shown = "" if "@" in base_url else f"'{one_line(base_url)}' "
    except ValueError:
        shown = ""
    raise UserError(
        f"{setting}.base_url: {shown}is not an address; use e.g. https://api.example.com/v1, and "
        "the key as key_env"
    )


class MixedSampler:
    """A Sampler of a team in which services play some agents."""

    def __init__(self, inner: Sampler, members: Mapping[int, ApiMember]) -> None:
        """Initialize the sampler. ``inner``: samples for the agents without a service."""
        self.inner, self.members = inner, members

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        member = self.members.get(agent)
        return self.inner.encode(agent, prompt) if member is None else member.encode(prompt)

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        """Return whether a prompt fits; services enforce their token limits themselves."""
        if agent in self.members:
            return len(prompt_ids) <= MAX_PROMPT
        return self.inner.fits(agent, prompt_ids, sampling)

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        return self.inner.token_texts(agent, token_ids)  # a service's completions have no tokens

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample the other agents while services answer. Raises ApiError if a service fails."""
        begun = {
            agent: member.begin(requests_N[agent], sampling.for_agent(agent))
            for agent, member in self.members.items()
            if agent < len(requests_N)  # a baseline's team may be smaller
        }
        sampled_N = self.inner.sample(
            [() if agent in begun else requests for agent, requests in enumerate(requests_N)],
            sampling,
        )
        for agent, answers in begun.items():
            sampled_N[agent] = answers.result()
        return sampled_N


class AnswerCache:
    """The newest answers by request digest, in memory and in a JSON Lines file.

    The file holds at most twice as many answers as memory.
    """

    def __init__(self, path: Path | None, limit: int = MAX_CACHED) -> None:
        """Load all files in the folder of ``path``; None: keep answers in memory only.

        Incomplete lines are skipped.
        """
        self._path, self._limit = path, limit
        self._answers: dict[str, Answer] = {}
        self._lines = 0
        for file in () if path is None else sorted(path.parent.glob("*.jsonl")):
            for line in file.read_bytes().splitlines():
                self._lines += file == path
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    self._put(*_read_line(line))

    def get(self, digest: str) -> Answer | None:
        """Return the stored answer to a request, or None."""
        return self._answers.get(digest)

    def add(self, digest: str, answer: Answer) -> None:
        """Store an answer. Raises OSError if it cannot be written."""
        self._put(digest, answer)
        if self._path is None:
            return
        self._lines += 1
        if self._lines > 2 * self._limit:
            text = "".join(_line(*pair) for pair in self._answers.items())
            files.replace(self._path, text)
            self._lines = len(self._answers)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            if file.tell() and not _ends_a_line(file):
                file.write(b"\n")
            file.write(_line(digest, answer).encode())

    def _put(self, digest: str, answer: Answer) -> None:
        self._answers[digest] = answer
        if len(self._answers) > self._limit:
            del self._answers[next(iter(self._answers))]


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


def _line(digest: str, answer: Answer) -> str:
    return json.dumps([digest, *answer]) + "\n"


def _read_line(line: bytes) -> tuple[str, Answer]:
    """Raise ValueError or TypeError for a line that holds no answer."""
    digest, text, finished, read, new = json.loads(line)
    if not isinstance(digest, str) or not isinstance(text, str):
        raise ValueError("no answer")
    return digest, Answer(text, bool(finished), read, new)
