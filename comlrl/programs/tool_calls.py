"""Calls of tools in an agent's text, in the form of Hermes and Qwen.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call of a function, its arguments as a JSON object in text."""

    name: str
    arguments: str


def parse(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Split a completion into what stands before its calls, and these.

    ``names``: the functions that may be called. A text with a call that is malformed, or of
    another function, has no calls: it is returned unchanged. Takes time linear in the text.
    """
    content, *blocks = text.split(OPEN)
    try:
        calls = [_call(block.split(CLOSE)[0], names) for block in blocks]
    except (ValueError, RecursionError):
        return text, []
    return (content.strip() if calls else text), calls


def _call(block: str, names: Collection[str]) -> ToolCall:
    """Raise ValueError for what is not a call of one of these functions."""
    value = json.loads(block, parse_constant=_refuse)
    if not isinstance(value, Mapping) or value.get("name") not in list(names):
        raise ValueError("no call of a function that was offered")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = json.loads(arguments, parse_constant=_refuse)
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments are not an object")
    return ToolCall(value["name"], json.dumps(arguments))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def render(content: str, calls: Sequence[ToolCall]) -> str:
    """Write calls as ``parse`` reads them, after the content before them."""
    blocks = [f'{OPEN}\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n{CLOSE}'
              for c in calls]  # fmt: skip
    return "\n".join([content, *blocks] if content else blocks)
