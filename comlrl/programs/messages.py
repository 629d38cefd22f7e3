"""Prompts as programs write them: a text, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from comlrl.types import Message

ROLES = get_args(get_type_hints(Message)["role"])

Prompt = str | Sequence[Message | Mapping[str, str]]


def messages(prompt: Sequence[Any]) -> tuple[Message, ...]:
    """A conversation as messages. Raises ValueError for what is none."""
    found = tuple(map(_message, prompt))
    if not found:
        raise ValueError("a prompt has no message")
    return found


def _message(given: Any) -> Message:
    if isinstance(given, Mapping):
        if set(given) != {"role", "content"}:
            raise ValueError(
                f"a message has `role` and `content`, not {', '.join(map(str, given))}"
            )
        given = Message(given["role"], given["content"])
    if not isinstance(given, Message):
        raise ValueError(f"a message is {given!r}; give role and content")
    if given.role not in ROLES:
        raise ValueError(f"a message's role is {given.role!r}; give one of {', '.join(ROLES)}")
    if not isinstance(given.content, str):
        raise ValueError(f"a message's content is {given.content!r}; give a text")
    return Message(given.role, str(given.content))
