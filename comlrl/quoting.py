"""Sanitizes texts of agents and experts before another model or a terminal sees them."""

from __future__ import annotations

import re
from typing import Any


def clean(text: str) -> str:
    """Remove characters from untrusted text that could break a tokenizer or form a special token.

    Lone surrogates become "?"; control characters and ``<|…|>``, ``<s>``, ``</s>`` are removed.
    """
    left: list[str] = []  # free of special tokens, including any that a removal would form
    for character in printable(text):
        left.append(character)
        if character == ">" and (start := _token_start(left)) is not None:
            del left[start:]
    return "".join(left)


def _token_start(text: list[str]) -> int | None:
    """Return the index of the special token that ends the text; None if there is none."""
    if text[-3:] == ["<", "s", ">"]:
        return len(text) - 3
    if text[-4:] == ["<", "/", "s", ">"]:
        return len(text) - 4
    if text[-2:-1] != ["|"]:
        return None
    start = len(text) - 3
    while start > 0 and text[start] not in ("|", "\n"):
        start -= 1
    return start - 1 if start > 0 and text[start - 1 : start + 1] == ["<", "|"] else None


def printable(text: str) -> str:
    """Return external text made safe for a terminal, without control characters.

    Escape sequences begin with such characters.
    """
    text = without_surrogates(text).replace("\r\n", "\n")
    return "".join(
        c if c.isprintable() or c in "\n\t" else " " if c.isspace() else "" for c in text
    )


def without_surrogates(text: str) -> str:
    """Replace lone surrogates with "?": no file, terminal or tokenizer accepts them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def clean_json(value: Any) -> Any:
    """Apply ``without_surrogates`` to all strings and keys of a value read from JSON."""
    if isinstance(value, str):
        return value if value.isascii() else without_surrogates(value)
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    if isinstance(value, dict):
        return {clean_json(name): clean_json(item) for name, item in value.items()}
    return value


def cut(text: str, limit: int) -> str:
    """Cut a text to ``limit`` characters, the last three of them dots if it was longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def one_line(text: str, limit: int = 300) -> str:
    """Return external text made safe for one line of a terminal."""
    return cut(" ".join(printable(text[: 10 * limit]).split()), limit)


def fenced(text: str) -> str:
    """Return a Markdown code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
