"""Whether a run may go on under a changed configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comlrl.config import Config, ConfigError, load_yaml

HARMLESS_SECTIONS = ("output", "wandb", "sandbox", "generation", "distributed", "agent_devices")
HARMLESS_KEYS = (
    "logging_steps", "max_steps", "max_env_steps", "num_train_epochs", "save_steps",
    "save_total_limit",
)  # fmt: skip


def check_unchanged(saved: Path, config: Config, force: bool) -> None:
    """Name every changed key. Raises ConfigError where one is not harmless, unless forced."""
    before, now = _flat(load_yaml(saved)), _flat(config.to_dict())
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    for key in changed:
        print(f"notice: resuming with {key}: {before.get(key)} → {now.get(key)}", file=sys.stderr)
    harmful = [key for key in changed if not _harmless(key)]
    if harmful and not force:
        key = harmful[0]
        raise ConfigError(
            f"{key}: {now.get(key)!r} differs from the run's {before.get(key)!r}"
            f"{f' (and {len(harmful) - 1} more)' if len(harmful) > 1 else ''}; "
            "set it back, or add --resume-force"
        )


def _harmless(key: str) -> bool:
    return key.partition(".")[0] in HARMLESS_SECTIONS or key.rpartition(".")[2] in HARMLESS_KEYS


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{key}.")
        elif value is not None and value != {}:
            flat[key] = value
    return flat
