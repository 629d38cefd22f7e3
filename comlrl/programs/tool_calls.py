"""Calls of tools in an agent's text, in the form of Hermes and Qwen, or of Qwen3-Coder.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>

<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call of a function, its arguments as a JSON object in text."""

    name: str
    arguments: str


def parse(text: str, types: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Split a completion into what stands before its calls, and these.

    ``types``: the functions that may be called, each with the JSON types of its parameters. A text
    with a call that is malformed, or of another function, has no calls: it is returned unchanged.
    Takes time linear in the text.
    """
    content, *blocks = text.split(OPEN)
    try:
        calls = [_call(block.split(CLOSE)[0].strip(), types) for block in blocks]
    except (ValueError, RecursionError):
        return text, []
    return (content.strip() if calls else text), calls


def _call(block: str, types: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """Raise ValueError for what is not a call of one of these functions."""
    name: Any
    arguments: Any
    if block.startswith("<function="):
        name, arguments = _of_elements(block, types)
    else:
        value = json.loads(block, parse_constant=_refuse)
        if not isinstance(value, Mapping):
            raise ValueError("the call is not an object")
        name, arguments = value.get("name"), value.get("arguments", {})
        if isinstance(arguments, str):  # some models write the object as a text
            arguments = json.loads(arguments, parse_constant=_refuse)
    if not isinstance(name, str) or name not in types or not isinstance(arguments, Mapping):
        raise ValueError("no call of a function that was offered")
    return ToolCall(name, json.dumps(arguments))


def _of_elements(block: str, types: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the function and the arguments of Qwen3-Coder's form, whose values are JSON where the
    parameter is no string."""
    head, *parts = block.split("<parameter=")
    name = head.removeprefix("<function=").split(">")[0].strip()
    arguments: dict[str, Any] = {}
    for part in parts:
        key, _, rest = part.partition(">")
        value: Any = rest.split("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        if types.get(name, {}).get(key) != "string":
            with contextlib.suppress(ValueError):
                value = json.loads(value, parse_constant=_refuse)
        arguments[key] = value
    return name, arguments


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def render(content: str, calls: Sequence[ToolCall]) -> str:
    """Write calls as ``parse`` reads them, after the content before them."""
    blocks = [f'{OPEN}\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n{CLOSE}'
              for c in calls]  # fmt: skip
    return "\n".join([content, *blocks] if content else blocks)
