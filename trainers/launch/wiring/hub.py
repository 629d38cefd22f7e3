"""Locate a configuration's models and data set: a local folder, the hub's cache, or the hub.

The hub is probed once, because the libraries would retry for a minute.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from comlrl.builtin import DATASETS, MODELS
from comlrl.config.paths import searched
from comlrl.config.plugins.targets import FROM_PYTHON, passed
from comlrl.errors import UserError, near
from comlrl.tasks.json_rows import KINDS

SECONDS = 10.0  # timeout after which the hub counts as unreachable
OFFLINE = "HF_HUB_OFFLINE"


def check_model(key: str, name: str, beside: Path) -> None:
    """Raise UserError for a model that is neither a local folder nor a valid name on the hub.

    ``beside``: the configuration's folder, against which paths are resolved.
    """
    _check_builtin(key, name, MODELS)
    if name.endswith(".gguf"):
        raise UserError(
            f"{key}: '{name}' is a GGUF file, which is no longer supported; use a model's folder "
            "(transformers converts it: from_pretrained(gguf_file=…), save_pretrained)"
        )
    if name in MODELS or Path(name).is_dir() or _may_be_remote(name):
        return
    raise UserError(
        f"{key}: '{name}' does not exist: {searched(beside)}; use a model's folder, or a name of "
        "the hub"
    )


def check_data(name: str, beside: Path) -> None:
    """Raise UserError for a data set that is neither local nor a valid name on the hub."""
    if name == FROM_PYTHON:
        passed("dataset.name")
        return
    _check_builtin("dataset.name", name, DATASETS)
    path = Path(name)
    readable = path.suffix.lower() in KINDS
    if path.is_file() and not readable:
        raise UserError(f"dataset.name: '{name}'; use a {', '.join(KINDS)} file")
    if name in DATASETS or path.exists() or (not readable and _may_be_remote(name)):
        return
    raise UserError(
        f"dataset.name: '{name}' does not exist: {searched(beside)}; use a file or folder that does"
    )


def check_reachable(named: Sequence[tuple[str, str]], beside: Path) -> None:
    """Restrict the libraries to the hub's cache if the hub cannot be reached.

    Raises UserError if a model or data set is then neither local nor cached. ``named``: (key, name)
    of each model and data set to load.
    """
    named = [(k, n) for k, n in named if n != FROM_PYTHON]
    remote = [(k, n) for k, n in named if not n.startswith("builtin:") and not Path(n).exists()]
    if not remote:
        return
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _answers():
        return
    why = f"{constants.ENDPOINT} does not answer"
    if constants.HF_HUB_OFFLINE:
        why = f"{OFFLINE} is set"
    for key, wanted in remote:
        cached = _cached_data(wanted) if key == "dataset.name" else model_folder(wanted)
        if not cached:
            raise UserError(
                f"{key}: '{wanted}' is not a local folder ({searched(beside)}) and not in the "
                f"hub's cache, and {why}; use a folder, or a name that is in the cache"
            )
    os.environ[OFFLINE] = "1"  # read by libraries when they are imported
    constants.HF_HUB_OFFLINE = True


def model_folder(name: str) -> Path | None:
    """Return a model's folder: a builtin's, a local one, or in the hub's cache; None if missing."""
    if name in MODELS:
        return MODELS[name]
    return Path(name) if Path(name).is_dir() else _snapshot(name, "model")


def _snapshot(name: str, kind: str) -> Path | None:
    """Return the folder in the hub's cache, if there is one, without contacting the hub."""
    if not _may_be_remote(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _check_builtin(key: str, name: str, builtins: Mapping[str, object]) -> None:
    """Raise UserError for a name with a colon that is not a builtin."""
    if ":" in name and name not in builtins and not Path(name).exists():
        hint = near(name, builtins, "the builtin are {}")
        raise UserError(f"{key}: '{name}' does not exist; {hint}")


def _may_be_remote(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _cached_data(name: str) -> bool:
    """Return whether a data set is in the hub's cache or in that of ``datasets``."""
    if _snapshot(name, "dataset") is not None:
        return True
    import datasets

    return (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def _answers() -> bool:
    """Return whether the hub responds at all; a refusal or a certificate error counts."""
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=SECONDS)
    except httpx.TransportError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__
        return cause is not None
    return True
