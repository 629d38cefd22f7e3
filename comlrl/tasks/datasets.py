"""Loads tasks from the Hub, a local folder or file, or ``builtin:``, with one syntax of splits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from comlrl.builtin import DATASETS, LEVELS
from comlrl.config.plugins.targets import FROM_PYTHON, passed
from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError, near, notice
from comlrl.tasks.json_rows import KINDS, json_rows
from comlrl.types import Domain, Task


def load_tasks(section: DatasetConfig, split: str, domain: Domain) -> list[Task]:
    """Return the tasks of a split such as ``train`` or ``test[33:163]``.

    A task's name is its row's ``task_id``, or else ``row_N`` by its index in the complete file
    (prefixed with the split's name if the data set has several files), regardless of slicing.
    Raises UserError, naming the row, for a row that the domain cannot use; with
    ``on_bad_row: skip`` it is skipped with a notice.
    """
    tasks: list[Task] = []
    for rows, index in _chosen(section, split):
        name, where = rows.names[index], rows.where(index)
        try:
            tasks.append(domain.task(name, rows.content[index]))
        except ValueError as error:
            if section.on_bad_row == "error":
                raise UserError(
                    f"dataset.name: '{section.name}' split '{split}': {where}: {error}; fix the "
                    "row, or set dataset.on_bad_row=skip"
                ) from error
            notice(f"dataset {where} is skipped: {error}")
    if not tasks:
        raise UserError(
            f"{split_key(section, split)}: '{split}' of '{section.name}' contains no usable row; "
            "choose another split"
        )
    names = _unique([task.task_id for task in tasks])
    return [replace(task, task_id=name) for task, name in zip(tasks, names, strict=True)]


def apart(held_out: Sequence[Task], training: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """Rename held-out tasks that have the name of a different training task.

    Also returns the original names of those whose rows are training rows.
    """
    names = {task.task_id for task in training}
    rows = {_content(task) for task in training}
    training_keys = {(task.task_id, _content(task)) for task in training}
    taken = names | {task.task_id for task in held_out}
    numbers = defaultdict[str, Iterator[int]](lambda: count(2))
    result, shared = [], []
    for task in held_out:
        content = _content(task)
        if content in rows:
            shared.append(task.task_id)
        if task.task_id in names and (task.task_id, content) not in training_keys:
            name = _free(task.task_id, taken, numbers[task.task_id])
            taken.add(name)
            task = replace(task, task_id=name)
        result.append(task)
    return result, shared


def _content(task: Task) -> str:
    """Return a text to compare rows by, without their names and empty columns, which may differ
    between files."""
    fields = task.fields.items()
    return repr(sorted((k, repr(v)) for k, v in fields if k != "task_id" and v is not None))


def _free(name: str, taken: set[str], numbers: Iterator[int]) -> str:
    """Return the first numbered name that is not taken. ``numbers``: those not yet tried."""
    return next(new for n in numbers if (new := f"{name}#{n}") not in taken)


def _unique(names: Sequence[str]) -> list[str]:
    """Make task names unique, because they are part of sampling keys."""
    taken, seen, result = set(names), set[str](), []
    numbers = defaultdict[str, Iterator[int]](lambda: count(2))
    for name in names:
        if name in seen:
            name = _free(name, taken, numbers[name])
            taken.add(name)
        seen.add(name)
        result.append(name)
    return result


@dataclass(frozen=True)
class Rows:
    """The rows of a file or of a data set's split."""

    content: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    lines: Sequence[int] | None  # line of each row in the file, 1-based

    def where(self, index: int) -> str:
        place = f"row {index}" if self.lines is None else f"line {self.lines[index]}"
        return f"{place} ('{self.names[index]}')"


def _chosen(section: DatasetConfig, split: str) -> Iterator[tuple[Rows, int]]:
    """Yield the rows that a split specifies. Raises UserError if it is invalid or empty."""
    import datasets

    key, name = split_key(section, split), section.name
    try:
        datasets.ReadInstruction.from_spec(split)
    except ValueError:
        raise UserError(f"{key}: '{split}' is not a split; write e.g. test[:16]") from None
    parts = [(part, part.strip().partition("[")[0]) for part in split.split("+")]
    bases = dict.fromkeys(base for _, base in parts)
    rows = {base: _load_split(name, base, f"{key}: '{split}'") for base in bases}
    sizes = {base: len(split_rows.content) for base, split_rows in rows.items()}
    counted = "+".join(_from_the_end(part, sizes[base]) for part, base in parts)
    pieces = datasets.ReadInstruction.from_spec(counted).to_absolute(sizes)
    places = [(rows[p.splitname], index) for p in pieces for index in range(p.from_, p.to)]
    if not places:
        there = " and ".join(f"{size:,} rows in '{base}'" for base, size in sizes.items())
        raise UserError(f"{key}: '{split}' of '{name}' is empty: there are {there}; choose another")
    yield from places


def _from_the_end(part: str, size: int) -> str:
    """Replace ``-p%`` by ``100%`` if it rounds to no rows; ``datasets`` would use the start."""

    def boundary(match: re.Match[str]) -> str:
        return "100%" if int(match[1]) and not round(int(match[1]) * size / 100) else match[0]

    return re.sub(r"-(\d+)%", boundary, part)


def _load_split(name: str, base: str, setting: str) -> Rows:
    """Load a complete split. ``setting``: key and value, for messages."""
    path = Path(name)
    if name == FROM_PYTHON:
        splits = passed("dataset.name").obj
        if base not in splits:
            raise UserError(
                f"{setting}: there is no split '{base}' of tasks; there are {', '.join(splits)}"
            )
        return _named(splits[base], None, prefix=f"{base}_" * (len(splits) > 1))
    if name.startswith("builtin:"):
        if name not in DATASETS:
            hint = near(name, DATASETS, "the builtin are {}")
            raise UserError(f"dataset.name: '{name}' does not exist; {hint}")
        if base not in DATASETS[name]:
            there = ", ".join(DATASETS[name])
            raise UserError(f"{setting}: '{name}' has no split '{base}'; choose from {there}")
        rows, lines = json_rows(DATASETS[name][base], name)
        if name not in LEVELS:
            return _named(rows, lines, prefix=f"{base}_")
        chosen = [index for index, row in enumerate(rows) if row["level"] in LEVELS[name]]
        names = [f"{base}_row_{index}" for index in chosen]  # independent of the levels
        return Rows([rows[index] for index in chosen], names, [index + 1 for index in chosen])
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        if path.is_file():
            raise UserError(f"dataset.name: '{name}'; use a {', '.join(KINDS)} file")
        return _named(_read(name, setting, base), None, prefix=f"{base}_")
    if not path.is_file():
        raise UserError(f"dataset.name: '{name}' does not exist; use a file that does")
    if kind == "json":
        return _named(*json_rows(path, name))
    return _named(_read(kind, setting, base, data_files={base: name}, name=name), None)


def _named(content: Any, lines: Sequence[int] | None, prefix: str = "") -> Rows:
    if isinstance(content, list):
        ids = [row.get("task_id") for row in content]
    else:  # a ``datasets`` table, faster to access by column
        ids = (
            list(content["task_id"]) if "task_id" in content.column_names else [None] * len(content)
        )
    names = [
        f"{prefix}row_{index}" if task_id is None or task_id == "" else str(task_id)
        for index, task_id in enumerate(ids)
    ]
    return Rows(content, _unique(names), lines)


def _read(
    source: str, setting: str, base: str, data_files: Any = None, name: str | None = None
) -> Any:
    """Load a split with the datasets library. Raises UserError for any error."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error contains everything
    name = name or source
    try:
        return datasets.load_dataset(source, data_files=data_files, split=base)
    except Exception as error:  # the libraries raise many kinds, all of which the user can fix
        for file in sorted(Path(name).glob("**/*.json*")):
            if KINDS.get(file.suffix) == "json":
                json_rows(file, str(file))  # its error names the line
        if isinstance(error, ValueError | KeyError | AssertionError | IndexError):
            raise UserError(f"{setting} of '{name}' cannot be read: {_line(error)}") from error
        raise UserError(f"dataset.name: '{name}' cannot be loaded: {_line(error)}") from error


def split_key(section: DatasetConfig, split: str) -> str:
    """Return the configuration key of a split."""
    return f"dataset.{'eval' if split == section.eval_split else 'train'}_split"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def split_size(split: str) -> int | None:
    """Return the number of rows in a slice (``test[33:163]`` → 130); None for other splits."""
    match = re.fullmatch(r"\w+\[(\d*):(\d+)\]", split)
    if not match:
        return None
    return max(0, int(match[2]) - int(match[1] or 0))
