"""The prompts that programs pass to agents: a text or a conversation, with optional tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from comlrl.quoting import without_surrogates
from comlrl.types import Message

ROLES = ("system", "user", "assistant", "tool")

Prompt = str | Sequence[Message | Mapping[str, str]]


def messages(prompt: Sequence[Any]) -> tuple[Message, ...]:
    """Convert a conversation to messages whose texts a tokenizer accepts.

    Raises ValueError if the conversation is empty or malformed.
    """
    conversation = tuple(map(_message, prompt))
    if not conversation:
        raise ValueError("a prompt without messages")
    return conversation


def offered(tools: Any) -> tuple[Message, ...]:
    """Return tools as a prompt's first message, or () without tools. Raises ValueError."""
    if not tools:
        return ()
    if not isinstance(tools, Sequence) or not all(map(_is_function, tools)):
        raise ValueError(
            'tools: pass a list of functions, {"type": "function", "function": {"name": …}}'
        )
    return (Message("tools", without_surrogates(json.dumps(list(tools), ensure_ascii=False))),)


def _is_function(tool: Any) -> bool:
    """Return whether a tool has the OpenAI API's format, which chat templates expect."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return named and tool.get("type") == "function"


def _message(message: Any) -> Message:
    if isinstance(message, Mapping):
        if set(message) != {"role", "content"}:
            raise ValueError(
                f"a message has `role` and `content`, not {', '.join(map(str, message))}"
            )
        message = Message(message["role"], message["content"])
    if not isinstance(message, Message):
        raise ValueError(f"a message is {message!r}; use a mapping with role and content")
    if message.role not in ROLES:
        raise ValueError(f"a message's role is {message.role!r}; use one of {', '.join(ROLES)}")
    if not isinstance(message.content, str):
        raise ValueError(f"a message's content is {message.content!r}; use a text")
    return Message(message.role, without_surrogates(message.content))
