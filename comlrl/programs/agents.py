"""The agents of an episode, the argument of a program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from comlrl.programs.messages import Prompt, messages, offered
from comlrl.programs.running import RunningEpisode
from comlrl.types import Completion, Message, Score


class Text(str):
    """A text that an agent has written.

    ``finished``: False where it was cut at ``max_new_tokens``. ``token_ids``: as sampled, the
    end-of-sequence token included.
    """

    finished: bool
    token_ids: tuple[int, ...]

    @classmethod
    def from_completion(cls, completion: Completion) -> Text:
        text = cls(completion.text)
        text.finished, text.token_ids = completion.finished, completion.token_ids
        return text


class Agent:
    """One agent of an episode: ``await agent(prompt)`` gives its completion."""

    def __init__(self, running: RunningEpisode, name: str) -> None:
        self.name = name
        self._running, self._index = running, running.program.index(name)

    async def __call__(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> Text:
        """Return one completion.

        ``prompt``: a text, which the agent reads as a user's message, after the message of
        ``prompts.system`` if there is one; or a whole conversation, messages with ``role``
        (system, user, assistant or tool) and ``content``. The completion continues an
        assistant's message at the end. ``tools``: functions that the agent may call, as the OpenAI
        API has them; the chat template shows them, and the completion is text.
        """
        if isinstance(prompt, str):
            prompt = (*self._running.settings.prompts.opening, Message("user", prompt))
        return Text.from_completion(
            await self._running.call(self._index, offered(tools) + messages(prompt))
        )


class Agents(Mapping[str, Agent]):
    """The agents of an episode by name, and what they share."""

    def __init__(self, running: RunningEpisode) -> None:
        self._running = running

    def __getitem__(self, name: str) -> Agent:
        return Agent(self._running, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._running.program.names_N)

    def __len__(self) -> int:
        return len(self._running.program.names_N)

    @property
    def prompts(self) -> dict[str, str]:
        """The domain's first prompt of each agent: of its i-th role for the i-th agent."""
        return dict(zip(self, self._running.first_prompts(), strict=True))

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible address of this episode's agents, each served as a model."""
        return self._running.address.base_url

    @property
    def api_key(self) -> str:
        """The key of this episode, for the same clients."""
        return self._running.address.api_key

    async def score(self, texts: Sequence[str] | Mapping[str, str]) -> Score:
        """Return the run's reward of one text per agent.

        ``texts``: a mapping by the agents' names, or a sequence in the order of ``program.agents``.
        """
        if isinstance(texts, Mapping):
            texts = [texts[name] for name in self]
        if isinstance(texts, str) or len(texts) != len(self):
            raise ValueError(f"agents.score expects {len(self)} texts, one of each agent")
        return await self._running.score(tuple(map(str, texts)))

    async def reward(self, name: str, value: float) -> None:
        """Reward an agent in the middle of an episode, for its calls so far."""
        if isinstance(value, str) or not math.isfinite(value):
            raise ValueError(f"agents.reward expects a finite number, not {value!r}")
        self._running.pay(self._running.program.index(name), float(value))


def room_for_process(agents: Agents) -> AbstractAsyncContextManager[None]:
    """Wait until the episode may start a process."""
    return agents._running.process()
