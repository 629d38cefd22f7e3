"""Paths in a configuration: resolved beside the YAML file, then in the working directory.

Paths on the command line are resolved in the working directory first, where a shell completes them.
Existing paths are stored as absolute paths, so a run's ``config.yaml`` works from any directory.
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
    """Make the paths in a value of one of ``KEYS`` absolute, relative to the first folder in which
    they exist; return anything else unchanged."""
    if isinstance(value, list):
        return [absolute(item, folders) for item in value]
    if isinstance(value, dict):  # the key ``agents``
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
    """Describe the folders that were searched for a path of a configuration.

    ``folder``: the YAML file's folder.
    """
    here = Path.cwd()
    if folder == here:
        return f"looked in {here}"
    return f"looked in {folder}, beside the YAML file, and in {here}"
