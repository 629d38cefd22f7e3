"""Parsing and checking of values from YAML files and command lines, independent of their keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from comlrl.errors import UserError

# The start of an interpolation (an odd number of backslashes escapes it), and a complete reference
# to another key. Other interpolations call resolvers such as oc.env, which read from elsewhere.
OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
REFERENCE = re.compile(OPENING.pattern + r"\s*[\w.\[\]-]+\s*\}")


@dataclass(frozen=True)
class Setting:
    """A dotted key with its value and its source."""

    key: str
    value: Any
    source: str


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file's mapping and resolve references to other keys. Raises UserError, naming the
    file."""
    try:
        with open(path, encoding="utf-8") as file:  # before OmegaConf copies what aliases repeat
            where = f"--config: {str(path)!r}"
            for text in check_values(yaml.safe_load(file), where):
                check_text(text, where)
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"--config: {str(path)!r} does not exist; name a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {str(path)!r} cannot be read: {error}") from None
    except RecursionError:
        raise UserError(f"--config: {str(path)!r} is nested too deep") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"--config: {str(path)!r} is not valid YAML: {line}") from None
    if not isinstance(tree, dict):
        raise UserError(f"--config: {str(path)!r} holds no mapping; write `section: …`")
    return {str(key): value for key, value in tree.items()}


MAX_VALUES = 100_000  # in one setting, or in one file


def check_values(value: Any, where: str) -> list[str]:
    """Return the strings in a YAML value. Raises UserError for a value that cannot be copied,
    printed or stored: it contains itself, expands to too many values through aliases, or has an
    integer of more than 64 bits."""
    pending, count, texts = [value], 0, []
    while pending:
        item, count = pending.pop(), count + 1
        if count > MAX_VALUES:
            raise UserError(
                f"{where}: more than {MAX_VALUES:,} values, or an alias that holds itself; write "
                "less, without aliases"
            )
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item
        elif isinstance(item, str):
            texts.append(item)
        elif isinstance(item, int) and abs(item) >= 1 << 63:
            raise UserError(f"{where}: an integer of more than 64 bits; use a smaller one")
    return texts


def check_text(text: str, where: str) -> None:
    """Raise UserError for an interpolation that is not a reference to another key, or for
    command-line bytes that the locale cannot decode."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(
            f"{where}: {printed(text)} cannot be read in this locale; set PYTHONUTF8=1, or "
            "LC_ALL=C.UTF-8"
        )
    rest, more = text, 1
    while more:  # references may be nested
        rest, more = REFERENCE.subn("x", rest)
    if OPENING.search(rest):
        raise UserError(
            f"{where}: {printed(text)} contains an interpolation that is not a reference; "
            "only ${section.key} is read: write the value itself"
        )


def printed(value: Any) -> str:
    """Return a value for an error message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= 200 else f"{text[:197]}..."


def parse_override(item: str) -> Setting:
    """Read ``a.b=value`` or ``--a.b=value`` with a YAML or Python literal.

    Raises UserError if there is no ``=``.
    """
    key, equals, text = item.removeprefix("--").partition("=")
    if not equals or not key.strip():
        raise UserError(f"--override: {item!r} is not `key=value`")
    key, text = key.strip(), text.strip()
    value = text if key.startswith("prompts.") else parse_value(text)  # templates contain braces
    return Setting(key, value, "--override")


def parse_value(text: str) -> Any:
    """Parse a value as YAML 1.2 or as a Python literal, or else return the text itself."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):  # 1e6 is a string in YAML 1.1
        return float(text)
    if re.fullmatch(r"[+-]?0\d{1,99}", text):  # read 010 as ten, not as octal eight
        return int(text)
    for read in (ast.literal_eval, yaml.safe_load):
        try:
            return read(text) if text else None
        except (ValueError, SyntaxError, yaml.YAMLError, MemoryError, RecursionError):
            continue
    return text


def normalise(value: Any) -> Any:
    """Normalize null to one spelling, and tuples to lists, whatever the source."""
    if isinstance(value, str) and value in ("None", "null", "~", ""):
        return None
    if isinstance(value, list | tuple):
        return [normalise(item) for item in value]
    if isinstance(value, dict):
        return {str(key): normalise(item) for key, item in value.items()}
    return value
