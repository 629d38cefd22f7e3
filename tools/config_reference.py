"""Writes ``docs/configuration.md`` from the dataclasses: python -m tools.config_reference

A key's meaning is the comment behind it, or the comment right above it. The docs cannot say
anything else than the code, and a test keeps them fresh.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comlrl.config import loader, sections
from trainers import configs
from trainers.launch.command_line import FLAGS

FILE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
COMMON = configs.CommonConfig
SHARED_PARENTS = (configs.PreferenceConfig, configs.ActorCriticConfig)
HEAD = """\
# Configuration

Written by `python -m tools.config_reference` from `comlrl/config/sections.py` and
`trainers/configs.py`.

A file is YAML: the sections below and one named after the algorithm. Every key may be left out.
`--override` takes any number of dotted keys, for example
`--override magrpo.learning_rate=1e-4 dataset.eval_split=test[:16] wandb=null`; values are YAML or
Python literals. Of file, older flags and `--override` the last one wins. An unknown key, a wrong
type or values that contradict each other are refused with one line before anything is loaded
(exit code 2). A setting that can have no effect beside the others, such as
`external.original_prompt` where `external.history` is `full`, is told in a notice.
`${section.key}` in a file repeats the value of another key; no other interpolation is read.

`--dry-run` also checks all that is at hand (every row of local data, models that are local or
cached, the sandbox, files of earlier runs), prints what a run would cost without loading weights,
and names in a line each what it could not check, such as a name of the hub.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One row of the reference."""

    name: str
    type: str
    default: str
    meaning: str


def keys_of(cls: type) -> dict[str, Key]:
    """The keys of a section's dataclass, inherited ones first; meanings are inherited too."""
    meanings: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if dataclasses.is_dataclass(parent):
            meanings |= {name: text for name, text in _comments(parent) if text}
    return {
        f.name: Key(f.name, _type(str(f.type)), _default(f), meanings.get(f.name, ""))
        for f in dataclasses.fields(cls)
    }


def _comments(cls: type) -> Iterator[tuple[str, str]]:
    """(field, comment behind or right above it) of the fields that a class itself declares."""
    source = inspect.getsource(cls)
    found = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for item in body.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            behind, _ = found.get(item.end_lineno or 0, ("", False))
            above: list[str] = []
            while found.get(line := item.lineno - 1 - len(above), ("", False))[1]:
                above.insert(0, found[line][0])
            yield item.target.id, behind or " ".join(above)


def _type(annotation: str) -> str:
    """A Python annotation as a person reads it: choices instead of Literal, null for None."""
    text = re.sub(
        r"Literal\[(.*?)\]",
        lambda m: " | ".join(f"`{_choice(choice.strip())}`" for choice in m[1].split(",")),
        annotation,
    )
    words = {"None": "null", "str": "text", "int": "whole number", "float": "number"}
    words |= {"bool": "true or false", "Any": "any"}
    text = re.sub(r"list\[(\w+)\]", r"list of \1", text)
    text = re.sub(r"dict\[.*?\]", "mapping", text)
    text = re.sub(r"(?<!`)\b(None|str|int|float|bool|Any)\b(?!`)", lambda m: words[m[1]], text)
    return text.replace(" | ", ", ").replace("number, text", "number or text")


def _choice(literal: str) -> str:
    """A Python literal as YAML has it."""
    value = ast.literal_eval(literal)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def table(keys: Sequence[Key]) -> str:
    rows = [f"| `{k.name}` | {k.type} | `{k.default}` | {_escaped(k.meaning)} |" for k in keys]
    return "\n".join(["| key | type | default | what it is |", "|---|---|---|---|", *rows]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def reference() -> str:
    """The whole page."""
    parts = [HEAD, "## Top of the file\n", table(list(keys_of(sections.Root).values()))]
    for name, cls in sections.SECTIONS.items():
        parts += [f"## `{name}`\n", _said(cls), table(list(keys_of(cls).values()))]
    parts += [
        "## Algorithms: keys that all have\n",
        "They stand in the section named after the algorithm. Where a default differs, it is "
        "listed with that algorithm again.\n",
        table(list(keys_of(COMMON).values())),
    ]
    for name, cls in configs.SECTIONS.items():
        parts += [f"## `{name}`\n", _said(cls)]
        own = _own(cls, COMMON)
        parts += [table(own)] if own else []
    parts += ["## Older spellings\n", _older(), "## Older flags\n", _flags()]
    return "\n".join(parts)


def _said(cls: type) -> str:
    """A section's docstring, and that of the keys that it shares with one other algorithm."""
    docs = [c.__doc__ or "" for c in (cls, *SHARED_PARENTS) if issubclass(cls, c)]
    paragraphs = [text for doc in docs for text in inspect.cleandoc(doc).split("\n\n")]
    return "\n\n".join(" ".join(text.replace("``", "`").split()) for text in paragraphs) + "\n"


def _own(cls: type, parent: type) -> list[Key]:
    """Keys that differ from the parent's: new ones, and other defaults or meanings."""
    inherited = keys_of(parent)
    return [key for name, key in keys_of(cls).items() if inherited.get(name) != key]


def _older() -> str:
    rows = [
        f"| `{old}` | {f'`{new}`' if new else 'read and ignored'} |"
        for old, new in loader.ALIASES.items()
    ]
    rows += [
        f"| {key} `{old if isinstance(old, str) else json.dumps(old)}` | `{new}` |"
        for key, older in loader.VALUE_ALIASES.items()
        for old, new in older.items()
    ]
    note = "They are read, with a notice; `<algo>` is the algorithm's section.\n"
    return "\n".join([note, "| older | now |", "|---|---|", *rows]) + "\n"


def _flags() -> str:
    rows = [f"| `--{flag}` | `{key}` |" for flag, key in FLAGS.items()]
    note = (
        "`--base_model qwen` is Qwen/Qwen2.5-Coder-1.5B; `--num_steps` also sets "
        "`num_train_epochs` and `max_steps` to null.\n"
    )
    return "\n".join([note, "| flag | key |", "|---|---|", *rows]) + "\n"


def main() -> int:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(reference(), encoding="utf-8")
    print(f"written: {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
