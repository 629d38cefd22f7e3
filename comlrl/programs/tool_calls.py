"""Tool calls in an agent's text, in the format of Hermes and Qwen or that of Qwen3-Coder.

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
    """A function call, with its arguments as the text of a JSON object."""

    name: str
    arguments: str


def parse(text: str, types: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Split a completion into the content before its calls, and the calls.

    ``types`` maps each function that may be called to the JSON types of its parameters. If a call
    is malformed or names another function, the text is returned unchanged, without calls. The time
    is linear in the length of the text.
    """
    content, *blocks = text.split(OPEN)
    try:
        calls = [_call(block.split(CLOSE)[0].strip(), types) for block in blocks]
    except (ValueError, RecursionError):
        return text, []
    return (content.strip() if calls else text), calls


def _call(block: str, types: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """Parse a call. Raises ValueError if it is malformed or not of a function in ``types``."""
    name: Any
    arguments: Any
    if block.startswith("<function="):
        name, arguments = _of_elements(block, types)
    else:
        value = json.loads(block, parse_constant=_refuse)
        if not isinstance(value, Mapping):
            raise ValueError("the call is not an object")
        name, arguments = value.get("name"), value.get("arguments", {})
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = json.loads(arguments, parse_constant=_refuse)
    if not isinstance(name, str) or name not in types or not isinstance(arguments, Mapping):
        raise ValueError("no call of a function that was offered")
    return ToolCall(name, json.dumps(arguments))


def _of_elements(block: str, types: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Parse a call in Qwen3-Coder's format. Values of other types than string are read as JSON."""
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
    """Return the content, followed by the calls in the format that ``parse`` reads."""
    blocks = [f'{OPEN}\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n{CLOSE}'
              for c in calls]  # fmt: skip
    return "\n".join([content, *blocks] if content else blocks)
