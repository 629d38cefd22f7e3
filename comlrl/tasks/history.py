"""An agent's own past and new feedback → what it reads at turn 2 and later.

``next_prompt`` composes, ``shorten`` makes it fit the model. Both are pure: whether a prompt fits
is the caller's to say, as only it has the tokenizer. An agent sees another agent's text only where
it acts after it in a turn; what feedback says about it is the external mode's.

With ``history="full"`` an agent reads its past prompts and responses as a conversation, then the
feedback. With ``"last"`` it reads, as asked for, the original problem and its last response. A
conversation always starts with the user and alternates, as chat templates demand; so a response
whose prompt is left out is quoted in the user's message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from comlrl.errors import UserError
from comlrl.types import Message


class PromptTooLongError(UserError):
    """Not even the newest turn fits the model; the message names the key to raise."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One past turn of one agent."""

    prompt: str  # its prompt at that turn: the problem at turn 1, feedback later
    response: str  # the response that was chosen to be revised
    handed_on: str = ""  # what it read, after the prompt, of those that acted before it

    @property
    def read(self) -> str:
        return with_handed_on(self.prompt, self.handed_on)


def with_handed_on(prompt: str, handed_on: str) -> str:
    """Return a prompt, followed by what others have handed on in this turn."""
    return f"{prompt.rstrip()}\n\n{handed_on}" if handed_on else prompt


def next_prompt(
    past: Sequence[Exchange],
    feedback: str,
    *,
    history: Literal["full", "last"] = "full",
    original_prompt: bool = False,
    previous_response: bool = True,
) -> tuple[Message, ...]:
    """Return the messages of the turn after ``past`` (at least one turn, oldest first).

    The two flags concern ``history="last"`` alone; "full" shows everything.
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

    Return the prompt and the number of turns that lost text. A past turn is dropped completely, its
    prompt and its response; of the newest, only the prompt is. The newest response and the feedback
    stay: if these alone do not fit, raise PromptTooLongError.
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
    """Return a user message with the response, without the prompt that it answers."""
    return Message("user", f"Your previous answer:\n{response.strip() or '(empty)'}\n\n{feedback}")
