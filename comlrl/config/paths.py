"""Paths in a configuration: looked for beside the YAML file, then in the working directory.

Those of the command line are looked for in the working directory first, where a shell completes
them. What is found is kept as an absolute path, so that a run's ``config.yaml`` holds anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Keys whose value may be a file or a folder; "<algo>" stands for any algorithm's section.
KEYS = (
    "dataset.name", "agent_model.name", "agents", "init_from", "<algo>.preferences",
    "<algo>.reward_model", "<algo>.reward_model_name", "<algo>.critic_model",
)  # fmt: skip


def absolute(value: Any, folders: Sequence[Path]) -> Any:
    """Make every path in a value of one of ``KEYS`` absolute that exists in one of the folders,
    the first that has it; return anything else as it is."""
    if isinstance(value, list):
        return [absolute(item, folders) for item in value]
    if isinstance(value, dict):  # of ``agents``
        return {
            key: absolute(item, folders)
            if key == "model" or (isinstance(item, dict) and key != "api")
            else item
            for key, item in value.items()
        }
    if not isinstance(value, str):
        return value
    name = Path(os.path.expanduser(value.strip()))
    existing = next((path for f in folders if os.path.exists(path := f / name)), None)
    if existing is None or not name.parts:
        return value
    return os.path.abspath(existing)


def searched(folder: Path) -> str:
    """Describe the folders in which a path of a configuration was looked for.

    ``folder``: that of the YAML file.
    """
    here = Path.cwd()
    if folder == here:
        return f"looked in {here}"
    return f"looked in {folder}, beside the YAML file, and in {here}"
