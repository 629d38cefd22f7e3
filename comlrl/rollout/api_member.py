"""An agent that an OpenAI-compatible service plays: it acts, and is never trained."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from comlrl import files
from comlrl.errors import ServerError, UserError
from comlrl.quoting import one_line
from comlrl.rollout import background
from comlrl.rollout.api_client import Answer, ApiClient, ApiFailure
from comlrl.types import Completion, Message, Request, Sampling

IN_FLIGHT = 16  # requests
MAX_CACHED = 100_000  # answers
MAX_PROMPT = 4_000_000  # bytes


class ApiError(ServerError):
    """The service plays its agent no more; the run ends with a checkpoint."""


class ApiMember:
    """A Sampler and AsyncSampler of one agent.

    A service reads messages, not tokens: the ids of a prompt are the bytes of its messages as JSON,
    and a completion has no ids. Its tokens are in ``metrics``, as the service counts them.
    """

    def __init__(
        self,
        role: str,
        *,
        base_url: str,
        model: str,
        key_env: str | None = None,
        cache: Path | None = None,
        on_error: Literal["stop", "empty"] = "stop",
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
    ) -> None:
        """Initialize the member.

        ``key_env``: the environment variable that holds the key; None: the service needs none.
        ``cache``: a file of answers, which a resumed run reads; one process writes it.
        ``on_error``: the effect of a failure after the retries, the end of the run or an empty
        completion. Raises UserError for a missing key and a malformed address.
        """
        self.setting = f"agents.{role}.api"
        self.model, self.on_error = model, on_error
        key = os.environ.get(key_env) if key_env else None
        if key_env and not key:
            raise UserError(f"{self.setting}.key_env: {key_env} is not set in the environment")
        if not base_url.startswith(("http://", "https://")):
            raise UserError(
                f"{self.setting}.base_url: '{one_line(base_url)}'; give it with http:// before it"
            )
        try:
            self.client = ApiClient(
                base_url, key, timeout=timeout, retries=retries, backoff=backoff
            )
        except ValueError as error:
            raise UserError(f"{self.setting}.base_url: {one_line(str(error))}") from error
        self.base_url = base_url
        newest = urlsplit(base_url).hostname == "api.openai.com"  # whose models refuse max_tokens
        self._limit = "max_completion_tokens" if newest else "max_tokens"
        self._cache = AnswerCache(cache)
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._counts: Counter[str] = Counter()  # since ``metrics``

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        """Return a prompt's messages as bytes."""
        return tuple(json.dumps([(m.role, m.content) for m in prompt]).encode())

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        """Return whether the service is asked at all; how much it reads is for it to say."""
        return len(prompt_ids) <= MAX_PROMPT

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        """Return nothing: completions have no tokens."""
        return []

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Return each request's completions, one for each key. Raises ApiError."""
        jobs = [
            self._sample(request, sampling.for_agent(agent))
            for agent, requests in enumerate(requests_N)
            for request in requests
        ]
        groups = iter(background.run(jobs))
        return [[next(groups) for _ in requests] for requests in requests_N]

    async def sample_one(
        self, agent: int, request: Request, sampling: Sampling
    ) -> tuple[Completion, ...]:
        """Return one request's completions, in any event loop. Raises ApiError."""
        job = self._sample(request, sampling.for_agent(agent))
        return await asyncio.wrap_future(background.submit(job))

    def metrics(self) -> dict[str, float]:
        """Return what was asked since the last call: ``requests`` of the service, answers that were
        ``cached`` and ``failed``, and its ``prompt_tokens`` and ``completion_tokens``."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

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
                    self._counts["requests"] += 1
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


class AnswerCache:
    """The newest answers by the digests of their requests, in memory and in a file of JSON lines,
    which holds at most twice as many."""

    def __init__(self, path: Path | None, limit: int = MAX_CACHED) -> None:
        """Open the cache; without a ``path`` it is in memory only. Torn lines are skipped."""
        self._path, self._limit = path, limit
        self._answers: dict[str, Answer] = {}
        self._lines = 0
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                self._lines += 1
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    self._put(*_read_line(line))

    def get(self, digest: str) -> Answer | None:
        """Return the answer to a request that was answered before."""
        return self._answers.get(digest)

    def add(self, digest: str, answer: Answer) -> None:
        """Keep an answer. Raises OSError where it cannot be written."""
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
