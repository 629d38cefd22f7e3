"""Custom algorithms: the location of a run's section class, with which its config is read."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

from comlrl import files
from comlrl.config import algorithms as configs
from comlrl.config.plugins.targets import Target, load
from comlrl.errors import UserError

FILE = "algorithm.json"  # in a run directory: name → module:Section


def add(algorithm: str, section: type) -> None:
    """Register the section of a custom algorithm in this process."""
    if not _is_section(section):
        raise TypeError(f"the section of `{algorithm}` must be a dataclass on CommonConfig")
    shipped = configs.SECTIONS.get(algorithm)
    if shipped is not None and _ships(shipped):
        raise ValueError(f"`{algorithm}` is a shipped algorithm; choose another name")
    configs.SECTIONS[algorithm] = section


def keep(folder: Path, algorithm: str, section: type) -> None:
    """Write the location of the run's section class, and a copy of the script if that defines it;
    do nothing for an algorithm that ships with the package."""
    if _ships(section):
        return
    module = section.__module__
    if module == "__main__":
        script = Path(str(sys.modules[module].__file__))
        module = re.sub(r"\W", "_", script.stem)
        files.replace(folder / f"{module}.py", script.read_bytes())
    target = {algorithm: f"{module}:{section.__qualname__}"}
    files.replace(folder / FILE, json.dumps(target, indent=1) + "\n")


def all_sections(*folders: Path | None) -> dict[str, type[configs.CommonConfig]]:
    """Return the sections of all algorithms, including those of the runs in ``folders``, whose
    modules are imported. If names repeat, the first one counts.

    Raises UserError for a damaged file or a module that cannot be imported.
    """
    sections: dict[str, type[configs.CommonConfig]] = {}
    for folder in folders:
        if folder is not None and (folder / FILE).is_file():
            sections = {**_read(folder), **sections}
    return {**sections, **configs.SECTIONS}


def _read(folder: Path) -> dict[str, type[configs.CommonConfig]]:
    file = folder / FILE
    try:
        targets = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{file}' is damaged ({error}); copy it from the run again") from error
    if not isinstance(targets, dict) or not all(isinstance(t, str) for t in targets.values()):
        raise UserError(f"'{file}' is damaged: write {{NAME: module:Section}}")
    loaded = {name: load(f"'{file}'", target, folder) for name, target in targets.items()}
    return {name: _section(target) for name, target in loaded.items()}


def _section(target: Target) -> type[configs.CommonConfig]:
    if not _is_section(target.obj):
        raise UserError(f"{target} is not a dataclass on CommonConfig; name one")
    return target.obj


def _is_section(section: object) -> bool:
    return (
        isinstance(section, type)
        and dataclasses.is_dataclass(section)
        and issubclass(section, configs.CommonConfig)
    )


def _ships(section: type) -> bool:
    return getattr(configs, section.__name__, None) is section
