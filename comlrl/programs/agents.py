"""The agents of an episode, as a program receives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from comlrl.programs.messages import Prompt, messages, offered
from comlrl.programs.running import RunningEpisode
from comlrl.rollout.checked import LARGEST, fits, number, shown
from comlrl.types import Completion, Message, Score


class Text(str):
    """A text that an agent has written.

    ``finished`` is False if the text was cut at ``max_new_tokens``. ``token_ids`` are the sampled
    tokens, including the end-of-sequence token.
    """

    finished: bool
    token_ids: tuple[int, ...]

    @classmethod
    def from_completion(cls, completion: Completion) -> Text:
        text = cls(completion.text)
        text.finished, text.token_ids = completion.finished, completion.token_ids
        return text


class Agent:
    """One agent of an episode: ``await agent(prompt)`` returns its completion."""

    def __init__(self, running: RunningEpisode, name: str) -> None:
        self.name = name
        self._running, self._index = running, running.program.index(name)

    async def __call__(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> Text:
        """Return one completion.

        Args:
            prompt: a text, read as a user message after the system message (``prompts.system``), if
                any; or a conversation of messages with ``role`` (system, user, assistant or tool)
                and ``content``. If the last message is an assistant's, the completion continues it.
            tools: functions that the agent may call, in the OpenAI API's format. The chat template
                renders them; calls are part of the returned text.
        """
        if isinstance(prompt, str):
            prompt = (*self._running.settings.prompts.opening, Message("user", prompt))
        return Text.from_completion(
            await self._running.call(self._index, offered(tools) + messages(prompt))
        )


class Agents(Mapping[str, Agent]):
    """The agents of an episode by name, with their prompts, endpoint and rewards."""

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
        """The domain's first prompt for each agent; the i-th agent gets the i-th role's prompt."""
        return dict(zip(self, self._running.first_prompts(), strict=True))

    @property
    def base_url(self) -> str:
        """The base URL of an OpenAI-compatible endpoint that serves each agent as a model."""
        return self._running.address.base_url

    @property
    def api_key(self) -> str:
        """The API key of this episode, for clients of ``base_url``."""
        return self._running.address.api_key

    async def score(self, texts: Sequence[str] | Mapping[str, str]) -> Score:
        """Score one text per agent with the run's reward.

        ``texts`` maps agent names to texts, or lists them in the order of ``program.agents``.
        Raises ValueError if the number of texts is wrong.
        """
        if isinstance(texts, Mapping):
            texts = [texts[name] for name in self]
        if isinstance(texts, str) or len(texts) != len(self):
            raise ValueError(f"agents.score expects {len(self)} texts, one of each agent")
        return await self._running.score(tuple(map(str, texts)))

    async def reward(self, name: str, value: float) -> None:
        """Reward an agent for its calls so far.

        Raises ValueError unless ``value`` is a finite number of at most ``LARGEST``.
        """
        reward = number(value)
        if not fits(reward):
            raise ValueError(
                f"agents.reward expects a finite number of at most {LARGEST:g}, not {shown(value)}"
            )
        self._running.pay(self._running.program.index(name), reward)


def room_for_process(agents: Agents) -> AbstractAsyncContextManager[None]:
    """Return a context to run a process in; entering it waits for a free slot."""
    return agents._running.process()
