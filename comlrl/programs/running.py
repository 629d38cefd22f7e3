"""An episode while it is played: its calls, scores and rewards, from Python or the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from comlrl.config.plugins.targets import TargetError
from comlrl.errors import UserError
from comlrl.programs.program import Address, EpisodeError, Program
from comlrl.rollout.checked import LARGEST, checked_score, fits, number, shown
from comlrl.tasks.prompts import Prompts
from comlrl.types import (
    AgentReward,
    Call,
    Completion,
    Episode,
    JointAction,
    Message,
    Reward,
    Sampler,
    Sampling,
    Score,
    Task,
)

T = TypeVar("T")

MAX_PROCESSES = 128  # concurrent commands of a rollout; each opens about five files and sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The settings that all episodes of a rollout share."""

    program: Program
    sampler: Sampler
    reward: Reward
    prompts: Prompts
    sampling: Sampling
    seed: int
    process: Callable[[float], float]  # the reward processor
    own_rewards: bool  # agents learn from ``Score.by_agent`` if a score sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    running: RunningEpisode
    slot: int  # index in the episode's calls
    agent: int
    number: int
    prompt: tuple[Message, ...]
    ids: tuple[int, ...]
    stop: tuple[str, ...]  # texts that end this completion, in addition to the run's

    @property
    def key(self) -> tuple[Any, ...]:
        """The random key. An agent's first call has the same key as the first turn of a tree."""
        settings, running = self.running.settings, self.running
        path = (self.number,) if self.number else ()
        return (settings.seed, *running.key, running.task.task_id, path, self.agent, running.g)

    @property
    def place(self) -> tuple[int, ...]:
        """The sort key of the call among all calls of a rollout: task, episode, slot."""
        return (*self.running.place, self.slot)

    def record(self, completion: Completion) -> None:
        """Add the call to its episode."""
        call = Call(
            agent=self.agent,
            number=self.number,
            prompt=self.prompt,
            prompt_ids=self.ids,
            completion=completion,
        )
        self.running.calls[self.slot] = call


@dataclass(frozen=True, slots=True)
class PendingScore:
    running: RunningEpisode
    action: JointAction


class Answers(Protocol):
    """Answers the calls and scores of a rollout's episodes."""

    def ask(self, call: PendingCall) -> asyncio.Future[Completion]:
        """Return a future of the completion; cancelling it withdraws the call."""

    def ask_score(self, score: PendingScore) -> asyncio.Future[Score]: ...

    def when_idle(self, patience: float) -> float | None:
        """Answer pending calls while no episode can continue by itself; return when to call again.

        Returns 0 after answering, the seconds until the next answer if it is delayed, and None if
        there is nothing to answer. Answers may wait ``patience`` seconds for further calls.
        """

    def close(self) -> None:
        """Wait for work in other threads to finish."""


@dataclass(slots=True, kw_only=True)
class RolloutContext:
    """The state that a rollout's episodes share, and the callbacks that answer and end them."""

    settings: RolloutSettings
    loop: asyncio.AbstractEventLoop
    fail: Callable[[RunningEpisode, str], None]  # ends an episode
    stop: Callable[[BaseException], None]  # ends all episodes and the run
    address: Callable[[RunningEpisode], Address]  # opens an episode to external programs
    answers: Answers
    closed: bool = False  # calls are no longer answered
    encoded: dict[tuple[int, tuple[Message, ...]], tuple[int, ...]] = field(default_factory=dict)
    processes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PROCESSES))

    def encode(self, agent: int, prompt: tuple[Message, ...]) -> tuple[int, ...]:
        """Return a prompt's token ids, cached because episodes of a task often share the prompt.

        A prompt that the model cannot encode ends the run, even if the program catches the error.
        """
        if (agent, prompt) not in self.encoded:
            try:
                self.encoded[agent, prompt] = self.settings.sampler.encode(agent, prompt)
            except UserError as error:
                self.stop(error)
                raise
        return self.encoded[agent, prompt]


class RunningEpisode:
    """An episode that is being played. All its calls go through ``call``."""

    def __init__(self, context: RolloutContext, task: Task, key: tuple, place: int, g: int) -> None:
        """Initialize the episode.

        ``key`` (phase, training step) is part of every sample's random key. ``place`` is the task's
        index and ``g`` the episode's index in its group.
        """
        self.context, self.settings = context, context.settings
        self.program = context.settings.program
        self.task, self.key, self.place, self.g = task, key, (place, g), g
        self.calls: list[Call | None] = []  # None: pending or withdrawn
        self.asked_N = [0] * len(self.program.names_N)
        self.paid: list[tuple[int, int, float]] = []  # agent, slot of the next call, value
        self.scored: list[tuple[Score, JointAction]] = []
        self.deadline = time.monotonic() + self.program.timeout
        self.waiting: set[asyncio.Future[Any]] = set()  # pending calls, scores and process slots
        self._waiting_since = 0.0
        self.ended = False

    def __str__(self) -> str:
        return f"{self.program.target}: task '{self.task.task_id}', episode {self.g + 1}"

    @cached_property
    def address(self) -> Address:
        """The address at which external programs reach the episode's agents."""
        return self.context.address(self)

    def first_prompts(self) -> tuple[str, ...]:
        """Return the domain's first prompt for each agent."""
        return self.settings.prompts.first(self.task, len(self.program.names_N))

    async def call(
        self, agent: int, prompt: tuple[Message, ...], stop: tuple[str, ...] = ()
    ) -> Completion:
        """Return one completion by one agent. ``stop``: texts that end it, besides the run's.

        Raises EpisodeError if the prompt is too long, and UserError if it cannot be encoded.
        Exceeding ``program.max_calls`` ends the episode, even if the program catches the error.
        """
        if not self.ended and len(self.calls) >= self.program.max_calls:
            self.context.fail(self, f"more than {self.program.max_calls} calls (program.max_calls)")
        await self._open()
        name, number = self.program.names_N[agent], self.asked_N[agent]
        ids, sampling = self.context.encode(agent, prompt), self.settings.sampling.for_agent(agent)
        if not self.settings.sampler.fits(agent, ids, sampling):
            await asyncio.sleep(0)  # a program that retries must not block the event loop
            raise EpisodeError(
                f"the prompt of call {number + 1} of `{name}` has {len(ids)} tokens, which leaves "
                f"no room for max_new_tokens={sampling.max_new_tokens}; shorten it, or raise "
                "agent_model.max_length if the model allows it"
            )
        call = PendingCall(
            running=self, slot=len(self.calls), agent=agent, number=number, prompt=prompt, ids=ids,
            stop=stop,
        )  # fmt: skip
        self.calls.append(None)
        self.asked_N[agent] += 1
        return await self._answer(self.context.answers.ask(call))

    async def score(self, texts_N: tuple[str, ...]) -> Score:
        """Return the run's score of one text per agent."""
        await self._open()
        action = JointAction(self.task, texts_N)
        score = await self._answer(self.context.answers.ask_score(PendingScore(self, action)))
        self.scored.append((score, action))
        return score

    def pay(self, agent: int, value: float) -> None:
        """Reward an agent before the episode ends, for its calls so far."""
        self.paid.append((agent, len(self.calls), value))

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[None]:
        """Wait until fewer than ``MAX_PROCESSES`` run; waiting does not count as episode time."""
        await self._answer(asyncio.ensure_future(self.context.processes.acquire()))
        try:
            yield
        finally:
            self.context.processes.release()

    async def _answer(self, answer: asyncio.Future[T]) -> T:
        """Await an answer; waiting does not count as episode time."""
        if not self.waiting:
            self._waiting_since = time.monotonic()
        self.waiting.add(answer)
        try:
            return await answer
        finally:
            self.waiting.discard(answer)
            if not self.waiting:
                self.deadline += time.monotonic() - self._waiting_since

    async def _open(self) -> None:
        """Block code that continues after the episode's end until it is cancelled."""
        if self.ended or self.context.closed:
            await self.context.loop.create_future()

    def episode(self, result: Any, error: str | None = None) -> Episode:
        """Return the finished episode. Raises TargetError if ``result`` is not a valid score."""
        names_N, process = self.program.names_N, self.settings.process
        where = f"{self} returned"
        score = checked_score(_by_name(result, names_N, where), len(names_N), where)
        action = next(
            (action for scored_result, action in self.scored if scored_result is result), None
        )
        agents = range(len(names_N))
        reward_N = score.by_agent if self.settings.own_rewards else None
        made_N = [[s for s, c in enumerate(self.calls) if c and c.agent == i] for i in agents]
        paid_N = tuple(
            (
                *(
                    AgentReward(sum(s < slot for s in made_N[i]), process(value) - process(0.0))
                    for agent, slot, value in self.paid
                    if agent == i
                ),
                AgentReward(len(made_N[i]), process(reward_N[i] if reward_N else score.value)),
            )
            for i in agents
        )
        calls = tuple(call for call in self.calls if call is not None)
        return Episode(
            calls=calls,
            score=score,
            reward=process(score.value),
            paid_N=paid_N,
            joint_action=action,
            error=error,
        )


def _by_name(result: Any, names_N: Sequence[str], where: str) -> Any:
    """Convert a mapping from agents to rewards to a Score; return anything else unchanged."""
    if not isinstance(result, Mapping):
        return result
    if set(result) != set(names_N):
        raise TargetError(
            f"{where} rewards of {', '.join(map(str, result)) or 'nobody'}; return a number for "
            f"each of {', '.join(names_N)}"
        )
    reward_N = tuple(number(result[name]) for name in names_N)
    for name, reward in zip(names_N, reward_N, strict=True):
        if not fits(reward):
            raise TargetError(
                f"{where} {shown(result[name])} for `{name}`; return finite numbers of at most "
                f"{LARGEST:g}"
            )
    return Score(math.fsum(reward_N) / len(reward_N), by_agent=reward_N)
