"""The state of a rollout, and the prompt that an agent reads in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from comlrl.quoting import clean
from comlrl.tasks.history import Exchange, PromptTooLongError, next_prompt, shorten, with_handed_on
from comlrl.tasks.prompts import Prompts
from comlrl.types import Completion, JointAction, Message, Sampler, Sampling, Task
from comlrl.types.sampling import Latent

LEFT_OUT = "\n(the rest is left out)"


@dataclass(frozen=True, slots=True)
class History:
    """The part of an agent's past that its later prompts include (``comlrl.tasks.history``)."""

    history: Literal["full", "last"] = "full"
    original_prompt: bool = False
    previous_response: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The end of a path in a tree: everything that the next prompts depend on."""

    tree: int
    task: Task
    key: tuple  # of the tree; goes into every sample's key
    turn: int
    parent: int
    parent_action: int
    path: tuple[int, ...]  # joint action taken at each node before
    past_N: tuple[tuple[Exchange, ...], ...]
    prompt_N: tuple[str, ...]  # each agent's newest: the problem at turn 1, feedback later
    latent_N: tuple[Latent | None, ...]  # each agent's at the turn before
    written: tuple[Completion, ...] = ()  # in this turn, by those that have acted in it
    handed_on: tuple[str, ...] = ()  # what each of those saw of ``written``
    history: tuple[JointAction, ...] = ()  # of the turns before, oldest first

    @property
    def start(self) -> tuple[int, ...]:
        """The path to the state in which this turn began."""
        return self.path[: len(self.path) - len(self.written)]

    def joint_action(self, written: Sequence[Completion]) -> JointAction:
        """Return what all agents wrote in this turn."""
        return JointAction(self.task, texts(written), self.turn, self.history)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The prompt that an agent reads at a node."""

    prompt: tuple[Message, ...]
    ids: tuple[int, ...]
    dropped: int  # oldest turns left out
    handed_on: str  # part of the prompt: this turn's texts by earlier agents
    prefill: str  # end of the prompt and beginning of the agent's text


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Builder of an agent's prompt from a state, shortened to fit the model."""

    sampler: Sampler
    prompts: Prompts
    history: History

    def read(self, state: State, agent: int, sampling: Sampling) -> Reading:
        """Build an agent's prompt. ``sampling``: the agent's settings.

        If it is too long, the oldest turns are dropped first; then the texts of this turn's earlier
        agents are truncated as needed. Raises PromptTooLongError if nothing more can be left out.
        """

        place = (state.task, agent, len(state.prompt_N))
        ids: tuple[int, ...] = ()  # of the prompt that was tried last

        def fits(prompt: Sequence[Message]) -> bool:
            nonlocal ids
            ids = self.sampler.encode(agent, self.prompts.full_prompt(prompt, *place))
            return self.sampler.fits(agent, ids, sampling)

        uncut = written = tuple(clean(text) for text in texts(state.written))
        limit = max(map(len, uncut), default=0)
        while True:
            shown = self._shown(state, agent, written)
            try:
                prompt, dropped = shorten(self._prompt(state, agent, shown), fits)
            except PromptTooLongError:
                if limit == 0:
                    raise
                limit //= 2
                written = tuple(
                    text if len(text) <= limit else text[:limit] + LEFT_OUT for text in uncut
                )
                continue
            read, prefill = self.prompts.full_prompt(prompt, *place), self.prompts.prefill(*place)
            return Reading(prompt=read, ids=ids, dropped=dropped, handed_on=shown, prefill=prefill)

    def _shown(self, state: State, agent: int, written: Sequence[str]) -> str:
        if not written:
            return ""
        return self.prompts.handed_on(state.task, agent, len(state.prompt_N), written)

    def _prompt(self, state: State, agent: int, shown: str) -> tuple[Message, ...]:
        prompt = with_handed_on(state.prompt_N[agent], shown)
        if not state.past_N[agent]:
            return (Message("user", prompt),)
        return next_prompt(
            state.past_N[agent],
            prompt,
            history=self.history.history,
            original_prompt=self.history.original_prompt,
            previous_response=self.history.previous_response,
        )


def texts(completions: Sequence[Completion]) -> tuple[str, ...]:
    return tuple(completion.text for completion in completions)
