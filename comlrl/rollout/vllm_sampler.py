"""Completions of a vLLM server, each agent's under its present adapter.

Whenever weights have moved since they were last sampled from, the adapter is written to a folder
that the server reads and loaded under a new name; then the one before is unloaded. A name ends in a
digest of the weights: a name that was used for other weights could be answered from a stale cache.

What is asked for ahead (``ask_ahead``) is sampled while weights move, under the adapters from
before; these stay loaded until something else is asked for ahead.

The server draws its own random numbers: what is sampled depends on what else it does, so that
neither keyed sampling nor bit-exact resuming hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from comlrl.errors import UserError
from comlrl.models.agent import Agent
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.rollout.vllm_replies import (
    KEY,
    MAX_REPLY,
    TOKEN_BYTES,
    ServerError,
    completions,
    top_two,
)
from comlrl.rollout.vllm_server import Refused, Server
from comlrl.types import Completion, Message, Request, Sampling

IN_FLIGHT = 64  # requests; the server forms the batches
RELOADS = 3  # of an adapter that a restarted server does not know


@dataclass(frozen=True, slots=True)
class _Asked:
    """Requests that are on their way, and what becomes of each."""

    requests_N: Sequence[Sequence[Request]]
    sampling: Sampling
    answers_N: list[list[Future]]

    def cancel(self) -> None:
        """Those that are not on their way yet."""
        for answers in self.answers_N:
            for answer in answers:
                answer.cancel()


class VLLMSampler:
    """A Sampler. Several processes may share a server: alike weights have one name."""

    def __init__(
        self, team: Team, server: Server, folder: Path, max_length: int, temperature: float
    ) -> None:
        """``folder``: for adapters; the server reads it too. ``max_length``: tokens of prompt and
        completion together. Raises UserError where the server cannot serve this team."""
        self.team, self.server, self.max_length = team, server, max_length
        self.folder = (folder / f"process_{distributed.rank()}").resolve()
        self.run = distributed.from_main(lambda: secrets.token_hex(3))  # others may share a server
        self._names: dict[int, str] = {}  # of each agent's adapter as it is loaded
        self._replaced: list[str] = []  # loaded before, and not unloaded yet
        self._kept: frozenset[str] = frozenset()  # not to be unloaded
        self._ahead: _Asked | None = None
        self._reloading = threading.Lock()
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was killed
        try:
            self._begin(temperature)
        except UserError:
            self.close()
            raise

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.team.of(agent).encode(prompt))

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return len(prompt_ids) + sampling.max_new_tokens <= self.max_length

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Completions of each agent's requests, in order: a tuple with one for each key. Raises
        ServerError."""
        asked = self._ahead
        if asked is not None and (asked.requests_N, asked.sampling) == (requests_N, sampling):
            self._ahead = None
        else:
            if any(requests_N):
                self._load_moved()
            asked = self._ask_all(requests_N, sampling)
        try:
            return [
                [
                    self._completions(self.team.of(i), request, answer.result(), sampling.of(i))
                    for request, answer in zip(requests, asked.answers_N[i], strict=True)
                ]
                for i, requests in enumerate(requests_N)
            ]
        except BaseException:
            self.server.leave()
            asked.cancel()
            raise

    def ask_ahead(self, requests_N: Sequence[Sequence[Request]], sampling: Sampling) -> None:
        """Begin with what ``sample`` will be called with, under the present adapters;
        ``sample`` raises what goes wrong. Called where all processes have what they asked for
        before; without requests it lets go of the adapters that were kept for that. Raises
        ServerError where adapters cannot be loaded."""
        assert self._ahead is None, "what was asked for ahead has not been taken"
        self._kept = frozenset()
        if not any(requests_N):
            self._unload_replaced()
            return
        self._load_moved()
        self._kept = frozenset(self._names.values())
        self._ahead = self._ask_all(requests_N, sampling)

    def close(self) -> None:
        """Unload what was loaded, if the server is still there."""
        self.server.leave()
        if self._ahead is not None:
            self._ahead.cancel()
        for name in (*self._names.values(), *self._replaced):
            self._unload(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes' are there yet
            self.folder.parent.rmdir()

    def _begin(self, temperature: float) -> None:
        """See that the server is fit for this team."""
        for agent in self.team.agents:
            if isinstance(agent.model.get_output_embeddings(), LoraLayer):
                raise UserError(
                    "lora.target_modules: the language-model head is among them, and vLLM serves "
                    "no adapter there; leave it out, or set generation.backend=builtin"
                )
        base, length = self.server.check()
        holds = length or self.max_length
        if holds < self.max_length:
            raise UserError(
                f"{KEY}: '{self.server.url}' holds {holds} tokens of prompt and completion, and "
                f"agent_model.max_length is {self.max_length}; start it with --max-model-len "
                f"{self.max_length}, or lower the latter"
            )
        try:
            self._load_moved()
            processed = temperature == 1 or self._processed(base, temperature)
        except ServerError as error:
            raise UserError(
                f"{error}; was it started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora "
                "and a --max-lora-rank of at least lora.r, and does it read this run's folder?"
            ) from error
        if not processed:
            raise UserError(
                f"{KEY}: '{self.server.url}' gives log-probabilities without the temperature "
                f"{temperature:g} that samples; start it with --logprobs-mode processed_logprobs"
            )

    def _processed(self, model: str, temperature: float) -> bool:
        """Whether log-probabilities are those of tempered logits: differences halve where the
        temperature doubles."""

        def difference(temperature: float) -> float:
            reply = self.server.ask(
                "/v1/completions",
                {
                    "model": model, "prompt": [self.team.agents[0].stop_ids[0]], "max_tokens": 1,
                    "temperature": temperature, "logprobs": 2, "return_tokens_as_token_ids": True,
                },
            )  # fmt: skip
            first, second = top_two(self.server.url, reply)
            return first - second

        return difference(2 * temperature) <= 0.75 * difference(temperature)

    def _load_moved(self) -> None:
        """Load the adapters that have moved, then unload those that they replace."""
        for agent in self.team.agents:
            name = f"{agent.adapter}-{self.run}-{_digest(agent)}"
            before = self._names.get(agent.index)
            if name == before:
                continue
            assert agent.peft is not None
            agent.peft.save_pretrained(
                str(self.folder / name),
                selected_adapters=[agent.adapter],
                save_embedding_layers=False,  # they are the base's; "auto" asks a hub for them
            )
            self._load(agent, name)
            self._names[agent.index] = name
            self._replaced += [] if before is None else [before]
        self._unload_replaced()

    def _unload_replaced(self) -> None:
        for name in [name for name in self._replaced if name not in self._kept]:
            self._replaced.remove(name)
            self._unload(name)
            shutil.rmtree(self.folder / name)

    def _load(self, agent: Agent, name: str) -> None:
        self.server.load(name, str(self.folder / name / agent.adapter))

    def _unload(self, name: str) -> None:
        with contextlib.suppress(ServerError):  # another process has, or the server was restarted
            self.server.ask("/v1/unload_lora_adapter", {"lora_name": name})

    def _ask_all(self, requests_N: Sequence[Sequence[Request]], sampling: Sampling) -> _Asked:
        jobs = [
            partial(self._ask, agent, self._names[agent.index], request, sampling.of(i))
            for i, requests in enumerate(requests_N)
            for agent in [self.team.of(i)]
            for request in requests
        ]
        found = iter(_in_threads(jobs))
        answers_N = [[next(found) for _ in requests] for requests in requests_N]
        return _Asked(requests_N, sampling, answers_N)

    def _ask(self, agent: Agent, name: str, request: Request, sampling: Sampling) -> Any:
        """The answer to a request under the adapter ``name``; runs in its own thread."""
        body: dict[str, Any] = {
            "model": name,
            "prompt": list(request.prompt_ids),
            "n": 1 if sampling.temperature == 0 else len(request.keys_G),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(agent.stop_ids),
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            # Else a model's generation_config.json would have its say.
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        tokens = len(request.prompt_ids) + body["n"] * sampling.max_new_tokens
        most = MAX_REPLY + TOKEN_BYTES * tokens
        for _ in range(RELOADS):
            try:
                return self.server.ask("/v1/completions", body, most=most)
            except Refused as error:
                if error.status != 404 or self.server.left:
                    raise
            with self._reloading:  # the server was restarted
                self._load(agent, name)
        raise ServerError(f"{KEY}: '{self.server.url}' does not keep the adapter {name}")

    def _completions(
        self, agent: Agent, request: Request, reply: Any, sampling: Sampling
    ) -> tuple[Completion, ...]:
        greedy = sampling.temperature == 0
        drawn = completions(
            self.server.url,
            reply,
            count=1 if greedy else len(request.keys_G),
            max_tokens=sampling.max_new_tokens,
            vocabulary=_vocabulary(agent),
        )
        ids_G = [ids for ids, _ in drawn]
        texts = agent.tokenizer.batch_decode(ids_G, skip_special_tokens=True)
        stop = set(agent.stop_ids)
        found = tuple(
            Completion(text, ids, ids[-1] in stop, math.nan if greedy else logprob)
            for text, (ids, logprob) in zip(texts, drawn, strict=True)
        )
        return found * len(request.keys_G) if greedy else found


def _in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Future]:
    """What becomes of each job. In daemons, unlike a pool's threads: a run that ends does not wait
    for answers that nobody needs any more."""
    found: list[Future] = [Future() for _ in jobs]
    waiting = deque(zip(found, jobs, strict=True))

    def work() -> None:
        while True:
            try:
                future, job = waiting.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)

    for _ in jobs[:IN_FLIGHT]:
        threading.Thread(target=work, daemon=True).start()
    return found


def _vocabulary(agent: Agent) -> int:
    """How many token ids the agent's model knows."""
    embedding: Any = agent.model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _digest(agent: Agent) -> str:
    """Of the weights that an agent trains."""
    digest = hashlib.blake2b(digest_size=6)
    for tensor in agent.state_tensors().values():
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
