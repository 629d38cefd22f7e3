"""Multi-agent reinforcement learning for teams of language models.

``comlrl`` itself is the core, from a configuration to a gradient. Its packages form a pipeline, and
each imports only earlier ones: types, keyed, files, config, builtin, tasks, processes, models,
credit, rollout, update, preferences, evaluation, loop.

In a checkout, ``rewards``, ``external``, ``loggers`` and ``trainers`` are folders at the top level.
Links in this folder make them packages of ``comlrl``; all code imports them as such.

The public names (docs/api.md) are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_API = "comlrl.trainers.launch.python_api"
_PUBLIC = {  # name → its module
    **dict.fromkeys(("train", "evaluate", "Run"), _API),
    **dict.fromkeys(
        ("Domain", "JointAction", "Reward", "Score", "Task", "Transition"), "comlrl.types"
    ),
    "UserError": "comlrl.errors",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'comlrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
