"""Prompts as programs write them: a text, or a conversation, with the tools that it may use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from comlrl.quoting import without_surrogates
from comlrl.types import Message

ROLES = ("system", "user", "assistant", "tool")

Prompt = str | Sequence[Message | Mapping[str, str]]


def messages(prompt: Sequence[Any]) -> tuple[Message, ...]:
    """Return a conversation as messages, with texts that a tokenizer accepts.

    Raises ValueError for a malformed one.
    """
    found = tuple(map(_message, prompt))
    if not found:
        raise ValueError("a prompt has no message")
    return found


def offered(tools: Any) -> tuple[Message, ...]:
    """Return tools as a prompt's beginning, empty if there are none. Raises ValueError."""
    if not tools:
        return ()
    if not isinstance(tools, Sequence) or not all(map(_is_function, tools)):
        raise ValueError(
            'tools: give a list of functions, {"type": "function", "function": {"name": …}}'
        )
    return (Message("tools", without_surrogates(json.dumps(list(tools), ensure_ascii=False))),)


def _is_function(tool: Any) -> bool:
    """Return whether a tool has the form of the OpenAI API, which chat templates read."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return named and tool.get("type") == "function"


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
    return Message(given.role, without_surrogates(given.content))
