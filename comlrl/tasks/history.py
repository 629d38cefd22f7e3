"""Composes an agent's prompt from turn 2 on, from its history and new feedback.

``next_prompt`` composes a prompt and ``shorten`` makes it fit the model. Both are pure: the caller,
who has the tokenizer, decides whether a prompt fits. An agent sees another agent's text only if it
acts later in the same turn; the external mode decides what feedback says about it.

With ``history="full"`` an agent sees its past prompts and responses as a conversation, then the
feedback. With ``"last"`` it sees, as configured, the original problem and its last response before
the feedback. A conversation starts with the user and alternates, as chat templates require, so a
response whose prompt is left out is quoted in the user's message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from comlrl.errors import UserError
from comlrl.types import Message


class PromptTooLongError(UserError):
    """The newest turn alone does not fit the model; the message names the keys to change."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One past turn of one agent."""

    prompt: str  # its prompt at that turn: the problem at turn 1, feedback later
    response: str  # the response that was chosen to be revised
    handed_on: str = ""  # texts of earlier agents in the turn, shown after the prompt

    @property
    def read(self) -> str:
        return with_handed_on(self.prompt, self.handed_on)


def with_handed_on(prompt: str, handed_on: str) -> str:
    """Return a prompt followed by the texts of earlier agents in this turn, if any."""
    return f"{prompt.rstrip()}\n\n{handed_on}" if handed_on else prompt


def next_prompt(
    past: Sequence[Exchange],
    feedback: str,
    *,
    history: Literal["full", "last"] = "full",
    original_prompt: bool = False,
    previous_response: bool = True,
) -> tuple[Message, ...]:
    """Return the prompt of the turn after ``past`` (at least one turn, oldest first).

    The two flags apply only to ``history="last"``; "full" shows everything.
    """
    assert past, "feedback needs an attempt that it is about"
    if history == "full":
        conversation = [
            message
            for turn in past
            for message in (Message("user", turn.read), Message("assistant", turn.response))
        ]
        return (*conversation, Message("user", feedback))
    problem, response = past[0].prompt, past[-1].response
    if original_prompt and previous_response:
        return (
            Message("user", problem),
            Message("assistant", response),
            Message("user", feedback),
        )
    if original_prompt:
        return (Message("user", f"{problem.rstrip()}\n\n{feedback}"),)
    if previous_response:
        return (_quoting(response, feedback),)
    return (Message("user", feedback),)


def shorten(
    prompt: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
) -> tuple[tuple[Message, ...], int]:
    """Shorten a prompt until it fits, dropping the oldest turns first.

    Returns the prompt and the number of turns that lost text. Older turns are dropped with prompt
    and response; of the newest, only the prompt is dropped. Raises PromptTooLongError if the newest
    response and the feedback alone do not fit.
    """
    messages, dropped = tuple(prompt), 0
    while not fits(messages):
        if len(messages) > 3:
            messages = messages[2:]
        elif len(messages) == 3:
            messages = (_quoting(messages[1].content, messages[2].content),)
        else:
            raise PromptTooLongError(
                "a prompt's newest turn alone exceeds agent_model.max_length (less the tokens to "
                "be generated); raise agent_model.max_length, or lower max_new_tokens or "
                f"external.sandbox_slice. It begins: {messages[-1].content[:80]!r}"
            )
        dropped += 1
    return messages, dropped


def _quoting(response: str, feedback: str) -> Message:
    """Return a user message that quotes the response before the feedback."""
    return Message("user", f"Your previous answer:\n{response.strip() or '(empty)'}\n\n{feedback}")
