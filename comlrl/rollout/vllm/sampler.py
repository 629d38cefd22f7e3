"""Sampling by vLLM servers, with each agent's current adapter.

``hold`` returns a sampler of the adapters of that moment, which stay loaded while weights change,
until the next ``hold`` or ``release``.

Servers draw their own random numbers, so completions depend on other requests: sampling is not
keyed, and resuming is not bit-exact.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comlrl.errors import ServerError, UserError
from comlrl.models.agent import Agent
from comlrl.models.team import Team
from comlrl.rollout.background import submit
from comlrl.rollout.stops import stop_texts
from comlrl.rollout.team_reader import TeamReader
from comlrl.rollout.vllm.adapters import Adapters
from comlrl.rollout.vllm.replies import Drawn, completions
from comlrl.rollout.vllm.servers import COMPLETIONS, GENERATE, MAX_REPLY, Servers
from comlrl.types import Completion, Request, Sampling, SamplingSupport

IN_FLIGHT = 64  # requests for each server; it forms the batches
SINGLE_IN_FLIGHT = 256  # of one completion each
TOKEN_BYTES = 1 << 10  # of a token: its id, its text (several times), its log-probability
ID_BYTES = 12  # of a token that survived truncation


class VLLMSampler(TeamReader):
    """Sampler of a team by vLLM servers."""

    def __init__(
        self,
        team: Team,
        servers_N: Sequence[Servers],
        folder: Path,
        max_length: int,
        sampling: Sampling,
    ) -> None:
        """Initialize the sampler.

        ``servers_N``: of each agent; agents may share an object. ``folder``: for adapters; the
        servers read it too. ``max_length``: tokens of prompt and completion together. ``sampling``:
        the settings of training. Raises UserError if a server does not load the adapters.
        """
        super().__init__(team, max_length)
        self.servers_N = servers_N
        self.adapters = Adapters(team, servers_N, folder)
        # Servers that return the tokens which truncation leaves need a top_k in every request.
        self.replaying = {
            servers_N[agent.index]
            for agent in team.agents
            if sampling.for_agent(agent.index).truncates
        }
        self.slots = _slots(servers_N, IN_FLIGHT)
        self.vocabularies = {agent.index: agent.vocabulary for agent in team.agents}
        try:
            self.adapters.load_moved(first=True)
        except ServerError as error:
            self.close()
            raise UserError(
                f"{error}; was it started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora "
                "and a --max-lora-rank of at least lora.r, and does it read "
                f"'{self.adapters.folder}' (in Docker: --ipc=host)?"
            ) from error

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample completions of each agent's requests, in order: a tuple with one for each key.

        Raises ServerError if the servers fail.
        """
        held = self.present() if any(requests_N) else HeldSampler(self, self.adapters.names)
        return held.sample(requests_N, sampling)

    def present(self) -> HeldSampler:
        """Return a sampler of the current adapters, valid until weights change.

        Raises ServerError if adapters cannot be loaded.
        """
        self.adapters.load_moved()
        return HeldSampler(self, dict(self.adapters.names))

    def weighted(
        self,
        requests_N: Sequence[Sequence[Request]],
        groups_N: Sequence[Sequence[tuple[Completion, ...]]],
        sampling: Sampling,
    ) -> list[list[tuple[Completion, ...]]]:
        """Return completions unchanged, because training does not use this sampler alone."""
        return [list(groups) for groups in groups_N]

    def hold(self) -> HeldSampler:
        """Return a sampler of the current adapters, loaded until the next ``hold`` or ``release``.

        No sampling with adapters held before may be in progress. Raises ServerError if adapters
        cannot be loaded.
        """
        self.adapters.pin(False)
        held = self.present()
        self.adapters.pin(True)
        return held

    def release(self) -> None:
        """Unload the adapters that were held, if others have replaced them."""
        self.adapters.pin(False)

    def leave(self) -> None:
        """Stop waiting for answers: ``sample`` raises ServerError in every thread."""
        for servers in self.servers_N:
            servers.leave()

    def close(self) -> None:
        """Unload the adapters from servers that still answer."""
        self.leave()
        self.adapters.close()


class HeldSampler:
    """A Sampler and AsyncSampler with fixed adapters. It may be used in a thread while weights
    change, and makes no collective call."""

    def __init__(self, engine: VLLMSampler, names: Mapping[int, str]) -> None:
        """Initialize. ``names``: agent → adapter name."""
        self.engine, self.names = engine, names
        self.encode, self.fits, self.token_texts = engine.encode, engine.fits, engine.token_texts
        self._slots = _slots(engine.servers_N, SINGLE_IN_FLIGHT)

    async def sample_one(
        self, agent: int, request: Request, sampling: Sampling
    ) -> tuple[Completion, ...]:
        """Return one request's completions. Cancellation also cancels the request. Raises
        ServerError if the servers fail."""
        answer = submit(self._ask(agent, request, sampling, self._slots))
        return self._read(agent, request, await asyncio.wrap_future(answer), sampling)

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        """Sample completions of each agent's requests, in order. Raises as ``sample_one``."""
        answers_N = [
            [submit(self._ask(i, request, sampling, self.engine.slots)) for request in requests]
            for i, requests in enumerate(requests_N)
        ]
        try:
            return [
                [
                    self._read(i, request, answer.result(), sampling)
                    for request, answer in zip(requests, answers_N[i], strict=True)
                ]
                for i, requests in enumerate(requests_N)
            ]
        except BaseException:
            self.engine.leave()
            for answer in itertools.chain(*answers_N):
                answer.cancel()
            raise

    async def _ask(
        self,
        index: int,
        request: Request,
        sampling: Sampling,
        slots: Mapping[Servers, asyncio.Semaphore],
    ) -> tuple[str, Any]:
        """Return the URL of the server that answered an agent's request, and the answer."""
        agent, sampling = self.engine.team.actor(index), sampling.for_agent(index)
        name, servers = self.names[agent.index], self.engine.servers_N[agent.index]
        vocabulary = self.engine.vocabularies[agent.index]
        greedy = sampling.temperature == 0
        params: dict[str, Any] = {
            "n": 1 if greedy else len(request.keys_G),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(agent.stop_ids),
            "logprobs": 0,  # of the sampled token alone
            # Else the model's generation_config.json would apply.
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": sampling.top_k or 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
            params |= {"skip_special_tokens": False}  # a stop may be one
        if servers in self.engine.replaying:
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
            path, body = COMPLETIONS, {"prompt": prompt, "return_token_ids": True} | params
        # A task's prompts share a prefix.
        prefix = request.task_id or str(prompt)
        async with slots[servers]:
            return await servers.ask(prefix, path, {"model": name} | body, most)

    def _read(
        self, index: int, request: Request, answer: tuple[str, Any], sampling: Sampling
    ) -> tuple[Completion, ...]:
        """Return a request's completions from the server's answer. Raises BadReply."""
        agent, sampling = self.engine.team.actor(index), sampling.for_agent(index)
        greedy = sampling.temperature == 0
        url, reply = answer
        drawn = completions(
            url,
            reply,
            count=1 if greedy else len(request.keys_G),
            max_tokens=sampling.max_new_tokens,
            vocabulary=self.engine.vocabularies[agent.index],
            support=_wants_support(sampling),
        )
        completed = tuple(_completion(agent, each, sampling) for each in drawn)
        return completed * len(request.keys_G) if greedy else completed


def _slots(servers_N: Sequence[Servers], count: int) -> dict[Servers, asyncio.Semaphore]:
    """Return a semaphore for ``count`` requests per server."""
    return {s: asyncio.Semaphore(max(1, count * len(s.members))) for s in servers_N}


def _completion(agent: Agent, drawn: Drawn, sampling: Sampling) -> Completion:
    ids, logprob_L, sets_L = drawn.token_ids, drawn.logprob_L, drawn.support_L
    text, stopped = agent.decode(ids), ids[-1] in agent.stop_ids
    if sampling.stop:
        stops = stop_texts(agent.tokenizer, sampling.stop)
        # A server that decodes several tokens at once may have continued after a stop.
        if (end := stops.end(ids)) is not None:
            ids, logprob_L, stopped = ids[:end], logprob_L[:end], True
            sets_L = None if sets_L is None else sets_L[:end]
            text = stops.text_before(ids)
    greedy = sampling.temperature == 0
    return Completion(
        text,
        ids,
        stopped,
        math.nan if greedy else math.fsum(logprob_L),
        logprob_L=() if greedy else logprob_L,
        support=None if sets_L is None else _support(sets_L),
    )


def _wants_support(sampling: Sampling) -> bool:
    """Return whether to request the tokens that truncation leaves, to learn over them."""
    return sampling.truncates and sampling.max_support is not None


def _support(sets_L: Sequence[Sequence[int]]) -> SamplingSupport:
    """Return the support; a server returns complete sets, of any size."""
    return SamplingSupport(
        torch.tensor([len(ids) for ids in sets_L], dtype=torch.int32),
        torch.tensor([token for ids in sets_L for token in ids], dtype=torch.int32),
        torch.full((len(sets_L),), torch.inf),
    )
