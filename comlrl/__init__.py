"""The core: from a configuration to a gradient, in rooms whose order is the pipeline's.

Each room imports those before it: types, keyed, files, config, builtin, tasks, processes, models,
credit, rollout, update, preferences, evaluation, loop. Nothing here imports another package of
the project.

The other packages are folders beside this one in a checkout, and packages below this one in the
wheel, where top-level names such as ``rewards`` may be someone else's. This file lets each be
imported by both names, ``rewards`` and ``comlrl.rewards``: two names of one module object. What
users import from here (docs/api.md) is loaded at its first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from comlrl.errors import notice

_PACKAGES = ("rewards", "external", "loggers", "trainers")
_IN_WHEEL = (Path(__file__).parent / _PACKAGES[0]).is_dir()


class _OtherName(MetaPathFinder, Loader):
    """Finds this project's modules by the name that their files do not have.

    In the wheel that is the short one, which goes with 2.1: somebody else's package of that name
    comes first, and the first use of ours prints a notice.
    """

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}  # by the other name, while it is imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real = _real_name(fullname)
        top = real.removeprefix("comlrl.").partition(".")[0]
        if real == fullname or top not in _PACKAGES:
            return None
        if _IN_WHEEL and fullname != top and not _is_ours(top):
            return None
        if _IN_WHEEL and fullname == top:
            if any(finder.find_spec(top, None) for finder in sys.meta_path if finder is not self):
                return None
            notice(
                f"`{top}` is `comlrl.{top}` where CoMLRL is installed from a wheel; "
                "2.1 will not find it by the short name"
            )
        found = importlib.util.find_spec(real)
        return found and ModuleSpec(fullname, self, origin=found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_real_name(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore ``__spec__``, which importlib replaced; the module ran under its real name."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def _real_name(name: str) -> str:
    if _IN_WHEEL:
        return name if name.startswith("comlrl.") else f"comlrl.{name}"
    return name.removeprefix("comlrl.")


def _is_ours(top: str) -> bool:
    return top in sys.modules and sys.modules[top] is sys.modules.get(f"comlrl.{top}")


sys.meta_path.insert(0, _OtherName())

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
