"""Completions of a vLLM server, each agent's under its present adapter.

Whenever weights have moved since they were last sampled from, the adapter is written to a folder
that the server reads and loaded under a new name; then the one before is unloaded. A name ends in a
digest of the weights: a name that was used for other weights could be answered from a stale cache.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from comlrl.config.sections import ConfigError
from comlrl.models.agent import Agent
from comlrl.models.team import Team
from comlrl.processes import distributed
from comlrl.rollout.vllm_server import KEY, Refused, Server, ServerError
from comlrl.types import Completion, Message, Request, Sampling

IN_FLIGHT = 64  # requests; the server forms the batches
RELOADS = 3  # of an adapter that a restarted server does not know


class VLLMSampler:
    """A Sampler. Several processes may share a server: alike weights have one name."""

    def __init__(
        self, team: Team, server: Server, folder: Path, max_length: int, temperature: float
    ) -> None:
        """``folder``: for adapters; the server reads it too. ``max_length``: tokens of prompt and
        completion together. Raises ConfigError where the server cannot serve this team."""
        self.team, self.server, self.max_length = team, server, max_length
        self.folder = (folder / f"process_{distributed.rank()}").resolve()
        self.run = distributed.from_main(lambda: secrets.token_hex(3))  # others may share a server
        self._names: dict[int, str] = {}  # of each agent's adapter as it is loaded
        self._reloading = threading.Lock()
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was killed
        try:
            self._begin(temperature)
        except ConfigError:
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
        if any(requests_N):
            self._load_moved()
        pool = ThreadPoolExecutor(IN_FLIGHT)
        try:
            asked_N = [
                [pool.submit(self._ask, self.team.of(i), r, sampling) for r in requests]
                for i, requests in enumerate(requests_N)
            ]
            return [
                [
                    self._completions(self.team.of(i), request, asked.result(), sampling)
                    for request, asked in zip(requests, asked_N[i], strict=True)
                ]
                for i, requests in enumerate(requests_N)
            ]
        except BaseException:
            self.server.leave()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Unload what was loaded, if the server is still there."""
        self.server.leave()
        for name in self._names.values():
            self._unload(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes' are there yet
            self.folder.parent.rmdir()

    def _begin(self, temperature: float) -> None:
        """See that the server is fit for this team."""
        for agent in self.team.agents:
            if isinstance(agent.model.get_output_embeddings(), LoraLayer):
                raise ConfigError(
                    "lora.target_modules: the language-model head is among them, and vLLM serves "
                    "no adapter there; leave it out, or set generation.backend=builtin"
                )
        base = self.server.check()
        holds = base.get("max_model_len") or self.max_length
        if holds < self.max_length:
            raise ConfigError(
                f"{KEY}: '{self.server.url}' holds {holds} tokens of prompt and completion, and "
                f"agent_model.max_length is {self.max_length}; start it with --max-model-len "
                f"{self.max_length}, or lower the latter"
            )
        try:
            self._load_moved()
            processed = temperature == 1 or self._processed(base["id"], temperature)
        except ServerError as error:
            raise ConfigError(
                f"{error}; was it started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora "
                "and a --max-lora-rank of at least lora.r, and does it read this run's folder?"
            ) from error
        if not processed:
            raise ConfigError(
                f"{KEY}: '{self.server.url}' gives log-probabilities without the temperature "
                f"{temperature:g} that samples; start it with --logprobs-mode processed_logprobs"
            )

    def _processed(self, model: str, temperature: float) -> bool:
        """Whether log-probabilities are those of tempered logits: differences halve where the
        temperature doubles."""

        def difference(heat: float) -> float:
            answer = self.server.ask(
                "/v1/completions",
                {
                    "model": model, "prompt": [self.team.agents[0].stop_ids[0]], "max_tokens": 1,
                    "temperature": heat, "logprobs": 2, "return_tokens_as_token_ids": True,
                },
            )  # fmt: skip
            likeliest = answer["choices"][0]["logprobs"]["top_logprobs"][0].values()
            first, second, *_ = sorted(likeliest, reverse=True)
            return first - second

        return difference(2 * temperature) <= 0.75 * difference(temperature)

    def _load_moved(self) -> None:
        """Load the adapters that have moved, then unload those that they replace."""
        replaced = []
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
            replaced += [] if before is None else [before]
        for name in replaced:
            self._unload(name)
            shutil.rmtree(self.folder / name)

    def _load(self, agent: Agent, name: str) -> None:
        self.server.load(name, str(self.folder / name / agent.adapter))

    def _unload(self, name: str) -> None:
        with contextlib.suppress(ServerError):  # another process has, or the server was restarted
            self.server.ask("/v1/unload_lora_adapter", {"lora_name": name})

    def _ask(self, agent: Agent, request: Request, sampling: Sampling) -> Any:
        """The answer to a request; in a thread of its own."""
        name = self._names[agent.index]
        body = {
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
        for _ in range(RELOADS):
            try:
                return self.server.ask("/v1/completions", body)
            except Refused as error:
                if error.status != 404:
                    raise
            with self._reloading:  # the server was restarted
                self._load(agent, name)
        raise ServerError(f"{KEY}: '{self.server.url}' does not keep the adapter {name}")

    def _completions(
        self, agent: Agent, request: Request, answer: Any, sampling: Sampling
    ) -> tuple[Completion, ...]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            ids = [tuple(choice["token_ids"]) for choice in choices]
            drawn = [math.fsum(choice["logprobs"]["token_logprobs"]) for choice in choices]
        except (LookupError, TypeError) as error:
            raise ServerError(
                f"{KEY}: '{self.server.url}' gives no token ids with log-probabilities "
                f"({type(error).__name__}: {error}); docs/scaling.md names the versions that do"
            ) from error
        texts = agent.tokenizer.batch_decode(ids, skip_special_tokens=True)
        stop, greedy = set(agent.stop_ids), sampling.temperature == 0
        found = tuple(
            Completion(text, own, own[-1] in stop, math.nan if greedy else logprob)
            for text, own, logprob in zip(texts, ids, drawn, strict=True)
        )
        return found * len(request.keys_G) if greedy else found


def _digest(agent: Agent) -> str:
    """Of the weights that an agent trains."""
    digest = hashlib.blake2b(digest_size=6)
    for tensor in agent.state_tensors().values():
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
