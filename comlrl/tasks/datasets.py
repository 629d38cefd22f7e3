"""Hub name, local folder or file, or ``builtin:`` → tasks; splits are sliced alike for all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from comlrl.builtin import DATASETS
from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError
from comlrl.types import Domain, Task

FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_tasks(
    section: DatasetConfig,
    split: str,
    domain: Domain,
    *,
    warn: Callable[[str], None] = print,
) -> list[Task]:
    """The tasks of a split such as ``train`` or ``test[33:163]``.

    Raises UserError, naming the row, for one that the domain cannot use; with ``on_bad_row:
    skip`` it is told to ``warn`` and left out.
    """
    tasks: list[Task] = []
    rows = _rows(section, split)
    for index, row in enumerate(rows):
        name = str(row.get("task_id") or f"row_{index}")
        try:
            tasks.append(domain.task(name, row))
        except ValueError as error:
            if section.on_bad_row == "error":
                raise UserError(
                    f"dataset.name: '{section.name}' split '{split}': row {index} ('{name}'): "
                    f"{error}; mend the row, or set dataset.on_bad_row=skip"
                ) from error
            warn(f"dataset row {index} ('{name}') is skipped: {error}")
    if not tasks:
        raise UserError(
            f"{split_key(section, split)}: '{split}' of '{section.name}' has no usable row; give "
            "another split"
        )
    return _unique(tasks)


def _unique(tasks: list[Task]) -> list[Task]:
    """Task names key the sampling, so that each must stand once."""
    seen: dict[str, int] = {}
    result = []
    for task in tasks:
        count = seen[task.task_id] = seen.get(task.task_id, 0) + 1
        name = task.task_id if count == 1 else f"{task.task_id}#{count}"
        result.append(replace(task, task_id=name))
    return result


def _rows(section: DatasetConfig, split: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    name, path = section.name, Path(section.name)
    if name.startswith("builtin:") and name not in DATASETS:
        raise UserError(f"dataset.name: '{name}'; the builtin are {', '.join(DATASETS)}")
    try:
        if name in DATASETS:
            files = {key: str(file) for key, file in DATASETS[name].items()}
            return datasets.load_dataset("json", data_files=files, split=split)
        if path.suffix in FILE_KINDS:
            if not path.is_file():
                raise UserError(f"dataset.name: '{name}' does not exist; give a file that does")
            base = re.split(r"[\[+]", split)[0]
            return datasets.load_dataset(
                FILE_KINDS[path.suffix], data_files={base: str(path)}, split=split
            )
        return datasets.load_dataset(name, split=split)
    except UserError:
        raise
    except (ValueError, KeyError, AssertionError, IndexError) as error:
        raise UserError(
            f"{split_key(section, split)}: '{split}' of '{name}' cannot be read: {_line(error)}"
        ) from error
    except Exception as error:  # the hub's and the readers' many kinds, each a user's matter
        raise UserError(f"dataset.name: '{name}' cannot be had: {_line(error)}") from error


def split_key(section: DatasetConfig, split: str) -> str:
    """The key that names a split."""
    return f"dataset.{'eval' if split == section.eval_split else 'train'}_split"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def split_size(split: str) -> int | None:
    """Number of rows that a split's text alone tells (``test[33:163]`` → 130), else None."""
    match = re.fullmatch(r"\w+\[(\d*):(\d+)\]", split)
    if not match:
        return None
    return max(0, int(match[2]) - int(match[1] or 0))
