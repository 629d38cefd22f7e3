"""Completions of vLLM servers, each agent's under its present adapter.

``hold`` gives a sampler that stays with the adapters of that moment: they stay loaded while weights
move, until others are held.

A server draws its own random numbers: what is sampled depends on what else it does, so that
neither keyed sampling nor bit-exact resuming hold.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from comlrl.errors import UserError
from comlrl.models.agent import Agent
from comlrl.models.team import Team
from comlrl.rollout.background import submit
from comlrl.rollout.stops import stop_texts
from comlrl.rollout.team_reader import TeamReader
from comlrl.rollout.vllm.adapters import Adapters
from comlrl.rollout.vllm.replies import (
    ID_BYTES,
    KEY,
    MAX_REPLY,
    TOKEN_BYTES,
    Drawn,
    ServerError,
    completions,
    top_two,
)
from comlrl.rollout.vllm.server import GENERATE, Server
from comlrl.rollout.vllm.servers import Servers
from comlrl.types import Completion, Request, Sampling, SamplingSupport

IN_FLIGHT = 64  # requests for each server; it forms the batches
SINGLE_IN_FLIGHT = 256  # of one completion each


class VLLMSampler(TeamReader):
    """A Sampler."""

    def __init__(
        self,
        team: Team,
        servers_N: Sequence[Servers],
        folder: Path,
        max_length: int,
        sampling: Sampling,
    ) -> None:
        """Initialize the sampler.

        ``servers_N``: of each agent, one object for agents that share theirs. ``folder``: for
        adapters; the servers read it too. ``max_length``: tokens of prompt and completion together.
        ``sampling``: training's. Raises UserError if a server cannot serve this team. In lock-step
        only the first process has servers and sends the requests of all.
        """
        super().__init__(team, max_length)
        self.servers_N = servers_N
        self.servers = tuple(dict.fromkeys(servers_N))
        self.adapters = Adapters(team, servers_N, folder)
        # Servers that return what truncation leaves want a top_k with every request.
        self.replaying = {
            servers_N[agent.index] for agent in team.agents if sampling.of(agent.index).truncates
        }
        self.slots = _slots(self.servers, IN_FLIGHT)
        self.vocabularies = {agent.index: agent.vocabulary for agent in team.agents}
        try:
            self._begin(sampling)
        except UserError:
            self.close()
            raise

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample completions of each agent's requests, in order: a tuple with one for each key.

        Raises ServerError.
        """
        if any(requests_N):
            self.adapters.load_moved()
        names = dict(self.adapters.names)
        return self.team.processes.once(lambda: self.sample_by(names, requests_N, sampling))

    def sample_by(
        self,
        names: Mapping[int, str],
        requests_N: Sequence[Sequence[Request]],
        sampling: Sampling,
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample with these loaded adapters. ``names``: of each agent of the team."""
        answers_N = [
            [submit(self.ask(names, i, request, sampling, self.slots)) for request in requests]
            for i, requests in enumerate(requests_N)
        ]
        try:
            return [
                [
                    self.read(self.team.of(i), request, answer.result(), sampling.of(i))
                    for request, answer in zip(requests, answers_N[i], strict=True)
                ]
                for i, requests in enumerate(requests_N)
            ]
        except BaseException:
            self.leave()
            for answer in itertools.chain(*answers_N):
                answer.cancel()
            raise

    def present(self) -> HeldSampler:
        """Return a sampler of the present adapters, until weights change.

        A collective call if models are split. Raises ServerError if adapters cannot be loaded.
        """
        self.adapters.load_moved()
        return HeldSampler(self, dict(self.adapters.names))

    def weighted(
        self,
        requests_N: Sequence[Sequence[Request]],
        groups_N: Sequence[Sequence[tuple[Completion, ...]]],
        sampling: Sampling,
    ) -> list[list[tuple[Completion, ...]]]:
        """Return completions unchanged: nothing that is sampled here is learned from."""
        return [list(groups) for groups in groups_N]

    def hold(self) -> HeldSampler:
        """Return a sampler of the present adapters, which stay loaded until the next call.

        The next ``hold`` or ``release`` ends them; no sampling with those held before may be under
        way. A collective call if models are split. Raises ServerError if adapters cannot be loaded.
        """
        self.adapters.pin(False)
        self.adapters.load_moved()
        self.adapters.pin(True)
        return HeldSampler(self, dict(self.adapters.names))

    def release(self) -> None:
        """Unload the adapters that were held, if others have replaced them."""
        self.adapters.pin(False)

    def leave(self) -> None:
        """Wait for no answer any more: ``sample`` raises ServerError, in whatever thread."""
        for servers in self.servers:
            servers.leave()

    def close(self) -> None:
        """Unload the adapters from the servers that are still there."""
        self.leave()
        self.adapters.close()

    def _begin(self, sampling: Sampling) -> None:
        """Check that the servers fit this team."""
        for agent in self.team.agents:
            if isinstance(agent.model.get_output_embeddings(), LoraLayer):
                raise UserError(
                    "lora.target_modules: the language-model head is among them, and vLLM serves "
                    "no adapter there; leave it out, or set generation.backend=builtin"
                )
        try:
            self.adapters.begin()
            self.team.processes.once(lambda: self._check(sampling))
        except ServerError as error:
            raise UserError(
                f"{error}; was it started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora "
                "and a --max-lora-rank of at least lora.r, and does it read this run's folder?"
            ) from error

    def _check(self, sampling: Sampling) -> None:
        """Raise UserError if a server is too small or has other log-probabilities."""
        bases = {server: self._base(server) for joined in self.servers for server in joined.members}
        for agent in self.team.agents:
            if (temperature := sampling.of(agent.index).temperature) != 1:
                servers = self.servers_N[agent.index]
                for server in servers.members:
                    _check_processed(
                        server, bases[server], agent.stop_ids[0], temperature, servers.patience
                    )

    def _base(self, server: Server) -> str:
        """Return the model that a server holds. Raises UserError if the server is too small."""
        base, length = server.check()
        if length is not None and length < self.max_length:
            raise UserError(
                f"{KEY}: '{server.url}' holds {length} tokens of prompt and completion, and "
                f"agent_model.max_length is {self.max_length}; start it with --max-model-len "
                f"{self.max_length}, or lower the latter"
            )
        return base

    async def ask(
        self,
        names: Mapping[int, str],
        index: int,
        request: Request,
        sampling: Sampling,
        slots: Mapping[Servers, asyncio.Semaphore],
    ) -> tuple[str, Any]:
        """Return the server that has answered an agent's request, and its answer. ``names``: of
        the adapters, by agent. ``slots``: room for requests that are under way."""
        agent, sampling = self.team.of(index), sampling.of(index)
        name, servers = names[agent.index], self.servers_N[agent.index]
        vocabulary = self.vocabularies[agent.index]
        greedy = sampling.temperature == 0
        params: dict[str, Any] = {
            "n": 1 if greedy else len(request.keys_G),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(agent.stop_ids),
            "logprobs": 0,  # of the sampled token alone
            # Else a model's generation_config.json would have its say.
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": sampling.top_k or 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
            params |= {"skip_special_tokens": False}  # a stop may be one
        if servers in self.replaying:
            params |= {"temperature": 1.0, "top_k": 1} if greedy else {}
            params["top_k"] = params["top_k"] or vocabulary
        prompt = list(request.prompt_ids)
        new = params["n"] * sampling.max_new_tokens
        most = MAX_REPLY + TOKEN_BYTES * (len(prompt) + new)
        body: dict[str, Any]
        if _wants_support(sampling):
            path, body = GENERATE, {"token_ids": prompt, "sampling_params": params}
            most += ID_BYTES * new * vocabulary
        else:
            path, body = "/v1/completions", {"prompt": prompt, "return_token_ids": True} | params
        # Caches are of an adapter; a task's later prompts begin as its first does.
        prefix = f"{name} {request.task_id or prompt}"
        async with slots[servers]:
            return await servers.ask(prefix, path, {"model": name} | body, most)

    def read(
        self, agent: Agent, request: Request, answer: tuple[str, Any], sampling: Sampling
    ) -> tuple[Completion, ...]:
        greedy = sampling.temperature == 0
        url, reply = answer
        drawn = completions(
            url,
            reply,
            count=1 if greedy else len(request.keys_G),
            max_tokens=sampling.max_new_tokens,
            vocabulary=self.vocabularies[agent.index],
            support=_wants_support(sampling),
        )
        completed = tuple(_completion(agent, each, sampling) for each in drawn)
        return completed * len(request.keys_G) if greedy else completed


class HeldSampler:
    """A Sampler and AsyncSampler by the adapters of one moment. It may be used in a thread while
    weights move, and makes no collective call."""

    def __init__(self, engine: VLLMSampler, names: Mapping[int, str]) -> None:
        """Initialize. ``names``: of the adapters, by agent."""
        self.engine, self.names = engine, names
        self.encode, self.fits, self.token_texts = engine.encode, engine.fits, engine.token_texts
        self._slots = _slots(engine.servers, SINGLE_IN_FLIGHT)

    async def sample_one(
        self, agent: int, request: Request, sampling: Sampling
    ) -> tuple[Completion, ...]:
        """Return one request's completions. It is withdrawn where this is cancelled. Raises
        ServerError."""
        engine = self.engine
        answer = await asyncio.wrap_future(
            submit(engine.ask(self.names, agent, request, sampling, self._slots))
        )
        return engine.read(engine.team.of(agent), request, answer, sampling.of(agent))

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        return self.engine.sample_by(self.names, requests_N, sampling)


def _slots(servers: Sequence[Servers], count: int) -> dict[Servers, asyncio.Semaphore]:
    """Return room for so many requests at each server."""
    return {joined: asyncio.Semaphore(max(1, count * len(joined))) for joined in servers}


def _completion(agent: Agent, drawn: Drawn, sampling: Sampling) -> Completion:
    text, by_text = agent.decode(drawn.token_ids), False
    if sampling.stop:
        stops = stop_texts(agent.tokenizer, sampling.stop)
        # A server that decodes several tokens at once may have written on after a stop.
        if (end := stops.end(drawn.token_ids)) is not None:
            drawn, by_text = drawn.up_to(end), True
            text = stops.text_before(drawn.token_ids)
    greedy = sampling.temperature == 0
    return Completion(
        text,
        drawn.token_ids,
        by_text or drawn.token_ids[-1] in agent.stop_ids,
        math.nan if greedy else math.fsum(drawn.logprob_L),
        logprob_L=() if greedy else drawn.logprob_L,
        support=None if drawn.support_L is None else _support(drawn.support_L),
    )


def _wants_support(sampling: Sampling) -> bool:
    """Return whether to request the tokens that truncation leaves, to learn over them."""
    return sampling.truncates and sampling.max_support is not None


def _support(support_L: Sequence[Sequence[int]]) -> SamplingSupport:
    """Return the support; a server returns complete sets, of any size."""
    return SamplingSupport(
        torch.tensor([len(ids) for ids in support_L], dtype=torch.int32),
        torch.tensor([token for ids in support_L for token in ids], dtype=torch.int32),
        torch.full((len(support_L),), torch.inf),
    )


def _check_processed(
    server: Server, base: str, stop_id: int, temperature: float, seconds: float
) -> None:
    """Raise UserError if log-probabilities are not those of tempered logits; and ServerError.

    Their differences halve when the temperature doubles.
    """

    def difference(temperature: float) -> float:
        body = {
            "model": base, "prompt": [stop_id], "max_tokens": 1, "temperature": temperature,
            "top_k": 2, "logprobs": 2, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        reply = submit(server.ask("/v1/completions", body, seconds)).result()
        first, second = top_two(server.url, reply)
        return first - second

    if difference(2 * temperature) > 0.75 * difference(temperature):
        raise UserError(
            f"{KEY}: '{server.url}' gives log-probabilities without the temperature "
            f"{temperature:g} that samples; start it with --logprobs-mode processed_logprobs"
        )
