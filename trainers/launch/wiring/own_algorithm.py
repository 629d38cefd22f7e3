"""A user's own algorithm: what a run keeps of its section, so that the run is evaluated, exported
and started from without the train script, of which nothing is imported for that."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from comlrl import files
from comlrl.config import algorithms as configs
from comlrl.config.resolved import Config
from comlrl.errors import UserError

FILE = "algorithm.json"  # of a run
FACTS = ("chains", "heterogeneous", "trained_online", "fits_reward_model", "one_policy")


def add(algorithm: str, section: type) -> None:
    """Let this process read the section of an algorithm that does not ship."""
    if not (dataclasses.is_dataclass(section) and issubclass(section, configs.CommonConfig)):
        raise TypeError(f"the section of `{algorithm}` must be a dataclass on CommonConfig")
    shipped = configs.SECTIONS.get(algorithm)
    if shipped is not None and _ships(shipped):
        raise ValueError(f"`{algorithm}` ships; give your algorithm another name")
    configs.SECTIONS[algorithm] = section


def keep(folder: Path, config: Config) -> None:
    """Write down what the run's section is like; nothing for one that ships."""
    section = config.section
    if _ships(type(section)):
        return
    facts = {
        "name": config.algorithm,
        "base": next(c for c in type(section).__mro__ if _ships(c)).__name__,
        "keys": dataclasses.asdict(type(section)()),
        "facts": {name: getattr(section, name) for name in FACTS},
    }
    files.replace(folder / FILE, json.dumps(facts, indent=1) + "\n")


def known(*folders: Path | None) -> dict[str, type[configs.CommonConfig]]:
    """The sections of all algorithms, and those of the runs in ``folders``; of one name the first.

    Raises UserError for a damaged file.
    """
    own = dict(filter(None, map(_read, reversed(folders))))
    return {**own, **configs.SECTIONS}


def _ships(section: type) -> bool:
    return getattr(configs, section.__name__, None) is section


def _read(folder: Path | None) -> tuple[str, type[configs.CommonConfig]] | None:
    """A run's own algorithm: its name, and a class that reads its section."""
    file = None if folder is None else folder / FILE
    if file is None or not file.is_file():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept["name"], _section(kept["base"], kept["keys"], kept["facts"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"'{file}' is damaged ({error}); copy it from the run again") from error


def _section(
    base_name: str, defaults: dict[str, Any], facts: dict[str, Any]
) -> type[configs.CommonConfig]:
    """The shipped class that the user's was made on, with the user's keys and defaults."""
    base = getattr(configs, base_name)
    types = typing.get_type_hints(base)
    plain = dataclasses.asdict(base())
    added = [
        (key, types.get(key, Any), _default(value))
        for key, value in defaults.items()
        if key not in plain or plain[key] != value
    ]
    namespace = {"__module__": base.__module__, **facts}
    return dataclasses.make_dataclass(
        base_name, added, bases=(base,), namespace=namespace, frozen=True
    )


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)
