"""Hub name, local folder or file, or ``builtin:`` → tasks; splits are sliced alike for all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comlrl.builtin import COOPMINI
from comlrl.config.sections import ConfigError, DatasetConfig
from comlrl.tasks.prompts import PromptError, signature
from comlrl.types import Task

FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
FIELDS = ("prompt", "test", "entry_point")


def load_tasks(
    section: DatasetConfig,
    split: str,
    *,
    check: Callable[[Task], object] = lambda task: None,
    warn: Callable[[str], None] = print,
) -> list[Task]:
    """The tasks of a split such as ``train`` or ``test[33:163]``.

    ``check`` raises ValueError for a task that cannot be used. Raises ConfigError, naming the
    row, for a bad one; with ``on_bad_row: skip`` it is told to ``warn`` and left out.
    """
    tasks: list[Task] = []
    rows = _rows(section, split)
    for index, row in enumerate(rows):
        try:
            task = _task(row, index)
            signature(task)
            check(task)
        except (PromptError, ValueError) as error:
            if section.on_bad_row == "error":
                raise ConfigError(
                    f"dataset.name: '{section.name}' split '{split}': {error}; mend the row, or "
                    "set dataset.on_bad_row=skip"
                ) from error
            warn(f"dataset row {index} is skipped: {error}")
            continue
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"dataset split '{split}' of '{section.name}' has no usable row")
    return _unique(tasks)


def _task(row: Mapping[str, Any], index: int) -> Task:
    for field in FIELDS:
        value = row.get(field)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"row {index} has no text in its field `{field}`")
    extra = {k: v for k, v in row.items() if k not in (*FIELDS, "task_id")}
    name = str(row.get("task_id") or f"row_{index}")
    return Task(name, row["prompt"], row["test"], row["entry_point"], extra)


def _unique(tasks: list[Task]) -> list[Task]:
    """Task names key the sampling, so that each must stand once."""
    seen: dict[str, int] = {}
    result = []
    for task in tasks:
        count = seen[task.task_id] = seen.get(task.task_id, 0) + 1
        name = task.task_id if count == 1 else f"{task.task_id}#{count}"
        result.append(Task(name, task.prompt, task.test, task.entry_point, task.extra))
    return result


def _rows(section: DatasetConfig, split: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    name, path = section.name, Path(section.name)
    if name.startswith("builtin:") and name != "builtin:coopmini":
        raise ConfigError(f"dataset.name: '{name}'; the builtin is 'builtin:coopmini'")
    try:
        if name == "builtin:coopmini":
            files = {key: str(file) for key, file in COOPMINI.items()}
            return datasets.load_dataset("json", data_files=files, split=split)
        if path.suffix in FILE_KINDS:
            if not path.is_file():
                raise ConfigError(f"dataset.name: '{name}' does not exist; give a file that does")
            base = re.split(r"[\[+]", split)[0]
            return datasets.load_dataset(
                FILE_KINDS[path.suffix], data_files={base: str(path)}, split=split
            )
        return datasets.load_dataset(name, split=split)
    except ConfigError:
        raise
    except (ValueError, KeyError, AssertionError, IndexError) as error:
        raise ConfigError(
            f"dataset split '{split}' of '{name}' cannot be read: {_line(error)}"
        ) from error
    except Exception as error:  # the hub's and the readers' many kinds, each a user's matter
        raise ConfigError(f"dataset.name: '{name}' cannot be had: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def split_size(split: str) -> int | None:
    """Number of rows that a split's text alone tells (``test[33:163]`` → 130), else None."""
    match = re.fullmatch(r"\w+\[(\d*):(\d+)\]", split)
    if not match:
        return None
    return max(0, int(match[2]) - int(match[1] or 0))
