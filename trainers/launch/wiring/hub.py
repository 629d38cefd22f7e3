"""Where the models and the data set of a configuration are: here, in the hub's cache, or on the
hub. Whether the hub answers is asked once, before a library retries for a minute.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from comlrl.builtin import DATASETS, MODELS
from comlrl.config.paths import searched
from comlrl.config.plugins.targets import near
from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.models.packed import is_packed
from comlrl.tasks.json_rows import KINDS

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SECONDS = 10.0  # until a hub that does not answer is taken to be out of reach
OFFLINE = "HF_HUB_OFFLINE"


def agents_models(config: Config) -> list[tuple[str, str]]:
    """(key, name) of the models that the agents have."""
    named = [("agents", name) for name in config.agents or ()]
    return named or [("agent_model.name", config.agent_model.name)]


def named_models(config: Config) -> list[tuple[str, str]]:
    """(key, name) of every model that a run loads; the agents' first."""
    return [*agents_models(config), *config.other_models.items()]


def check_model(key: str, name: str, config: Config) -> None:
    """Raises UserError for a model that is neither here nor can be a hub's."""
    _check_builtin(key, name, MODELS)
    if name in MODELS or Path(name).is_dir() or _may_be_remote(name):
        return
    raise UserError(
        f"{key}: '{name}' does not exist: {searched(config.beside)}; give a model's folder, or a "
        "name of the hub"
    )


def check_data(config: Config) -> None:
    """Raises UserError for a data set that is neither here nor can be a hub's."""
    name = config.dataset.name
    _check_builtin("dataset.name", name, DATASETS)
    path = Path(name)
    readable = path.suffix in KINDS
    if path.is_file() and not readable:
        raise UserError(f"dataset.name: '{name}'; give a {', '.join(KINDS)} file")
    if name in DATASETS or path.exists() or (not readable and _may_be_remote(name)):
        return
    raise UserError(
        f"dataset.name: '{name}' does not exist: {searched(config.beside)}; give a file or folder "
        "that does"
    )


def check_reachable(config: Config, models: list[tuple[str, str]]) -> None:
    """Where the hub is out of reach, keep the libraries to its cache.

    Raises UserError for what lies neither here nor there. ``models``: (key, name) of each that
    is to be loaded.
    """
    name = config.dataset.name
    found = {("dataset.name", name): name in DATASETS or Path(name).exists() or _cached_data(name)}
    found |= {
        (key, model): is_packed(model) or model_folder(model) is not None for key, model in models
    }
    remote = not all(n.startswith("builtin:") or Path(n).exists() for _, n in found)
    if not remote or (not _offline() and _answers()):
        return
    why = f"{OFFLINE} is set" if _offline() else f"{_endpoint()} does not answer"
    for (key, wanted), here in found.items():
        if not here:
            raise UserError(
                f"{key}: '{wanted}' is not a folder here ({searched(config.beside)}) and not in "
                f"the hub's cache, and {why}; give a folder, or a name that is in the cache"
            )
    os.environ[OFFLINE] = "1"


def model_folder(name: str) -> Path | None:
    """Where a model lies: the builtin's folder, a local one, or the hub's cache; None: nowhere."""
    if name in MODELS:
        return MODELS[name]
    if Path(name).is_dir():
        return Path(name)
    snapshots = _cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    return max(snapshots.glob("*"), key=lambda p: p.stat().st_mtime, default=None)


def tensor_shapes(folder: Path | None) -> dict[str, Sequence[int]]:
    """Tensor name → shape, read from safetensors headers: 8 bytes of length, then JSON."""
    shapes: dict[str, Sequence[int]] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        shapes |= {n: t["shape"] for n, t in header.items() if n != "__metadata__"}
    return shapes


def _check_builtin(key: str, name: str, known: Mapping[str, object]) -> None:
    """Raises UserError for a name with a colon that is not a builtin one."""
    if ":" in name and name not in known and not Path(name).exists():
        hint = near(name, known, "the builtin are {}")
        raise UserError(f"{key}: '{name}' does not exist; {hint}")


def _may_be_remote(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and not name.startswith(".")


def _home() -> Path:
    return Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))


def _cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE", _home() / "hub"))


def _cached_data(name: str) -> bool:
    """Whether the hub's cache has files of a data set, or the reader's its rows."""
    read = Path(os.environ.get("HF_DATASETS_CACHE", _home() / "datasets"))
    kept = _cache() / f"datasets--{name.replace('/', '--')}" / "snapshots"
    return kept.is_dir() or (read / name.replace("/", "___")).is_dir()


def _offline() -> bool:
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _answers() -> bool:
    """Whether the hub gives any answer; a refusal and a certificate are answers."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(_endpoint(), method="HEAD"), timeout=SECONDS
        ):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError as error:
        return "certificate" in str(error).lower()
