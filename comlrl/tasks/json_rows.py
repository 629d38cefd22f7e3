"""Reads the rows of JSON files with their line numbers, which errors name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comlrl.errors import UserError
from comlrl.quoting import clean_json

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def json_rows(file: Path, name: str) -> tuple[list[dict[str, Any]], list[int] | None]:
    """Return the rows of a .jsonl or .json file, and the line of each (1-based).

    All rows have the same keys; missing values are None. Lines are None if the file is one JSON
    list, whose rows need not be on separate lines.

    ``name``: the file as the user wrote it. Raises UserError if it is unreadable, empty or invalid.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"dataset.name: '{name}' is not UTF-8 text: {error}") from None
    except OSError as error:
        raise UserError(f"dataset.name: '{name}' cannot be read: {error.strerror}") from None
    if text.lstrip().startswith("["):
        values, lines = enumerate(_parsed(text, name)), None
        rows = [_object(row, name, f"row {index}") for index, row in values]
    else:
        pairs = list(_lines(text, name))
        rows, lines = [row for _, row in pairs], [line for line, _ in pairs]
    if not rows:
        raise UserError(
            f"dataset.name: '{name}' contains no rows; write a JSON object on each line"
        )
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows], lines


def _lines(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):  # strings may contain other line breaks
        if line.strip():
            yield number, _object(_parsed(line, name, number), name, f"line {number}")


def _parsed(text: str, name: str, line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {line + error.lineno - 1}, column {error.colno}"
        raise UserError(f"dataset.name: '{name}' {where}: {error.msg}; fix the line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"dataset.name: '{name}' line {line}: {error}; fix the line") from None


def _object(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"dataset.name: '{name}' {where} is not a JSON object; write {{…}}")
    try:
        return clean_json(value)
    except RecursionError as error:
        raise UserError(f"dataset.name: '{name}' {where}: {error}; fix the row") from None
