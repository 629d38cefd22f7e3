"""The user's own modules: import from beside a YAML file, and digests of their files.

The folder is first on ``sys.path`` during an import, and last afterwards. Importing from another
folder unloads the earlier modules, so that two runs may have modules of the same name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from comlrl import files
from comlrl.errors import UserError

MODULES = "modules.json"  # in a run directory: file of a user's module → SHA-256


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of a user's module, with its content at import."""

    name: str  # path relative to the top-level module's folder, e.g. ``pack/parts.py``
    file: Path
    content: bytes
    beside: bool  # found beside the YAML file, not on the Python path

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


_sources: dict[str, Source] = {}  # imported modules beside the YAML file, by name
_folder: Path | None = None  # the YAML file's folder


def keep(folder: Path, sources: Sequence[Source]) -> None:
    """Write copies of files from beside the YAML, and digests of all files, into a run."""
    for source in sources:
        if source.beside:
            file = folder / source.name
            file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(file, source.content)
    if sources:
        files.replace(folder / MODULES, json.dumps(digests(sources), indent=1) + "\n")


def stored_digests(folder: Path) -> dict[str, str]:
    """Return the digests that ``keep`` wrote, by file."""
    file = folder / MODULES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def digests(sources: Iterable[Source]) -> dict[str, str]:
    return {source.name: source.sha256 for source in sources}


def is_beside(module: str, folder: Path) -> bool:
    base = folder.joinpath(*module.split("."))
    return base.with_name(base.name + ".py").is_file() or (base / "__init__.py").is_file()


def check_name(module: str, folder: Path) -> None:
    """Raise UserError if a module beside the YAML file has the name of a standard module, or of a
    module already imported from elsewhere."""
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    elsewhere = loaded is not None and top not in _sources and not _lies_in(loaded, folder)
    if top in sys.stdlib_module_names or elsewhere:
        raise UserError(f"another module is named `{top}`; rename that in {folder}")


def import_beside(module: str, folder: Path) -> tuple[ModuleType, tuple[Source, ...]]:
    """Import a module from a folder, and return it with the files imported from there.

    Raises what the import raises, and UserError for a name that ``check_name`` refuses.
    """
    global _folder
    if folder != _folder:
        forget()
        _folder = folder
    before, bytecode = set(sys.modules), sys.dont_write_bytecode
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    sys.dont_write_bytecode = True
    try:
        loaded = importlib.import_module(module)
        for name in sys.modules.keys() - before:
            if _lies_in(sys.modules[name], folder):
                check_name(name, folder)
                if (source := _source(sys.modules[name], True)) is not None:
                    _sources[name] = source
    except BaseException:
        for name in sys.modules.keys() - before:
            if _lies_in(sys.modules[name], folder):
                del sys.modules[name]
        raise
    finally:
        sys.dont_write_bytecode = bytecode
        sys.path.remove(str(folder))
        sys.path.append(str(folder))
    return loaded, tuple(sorted(_sources.values(), key=lambda source: source.name))


def on_path(module: ModuleType) -> tuple[Source, ...]:
    """Return the file of a module that was found on the Python path."""
    source = _source(module, False)
    return () if source is None else (source,)


def forget() -> None:
    """Unload the modules of the last folder imported from, and remove it from ``sys.path``."""
    for name in _sources:
        sys.modules.pop(name, None)
    _sources.clear()
    if str(_folder) in sys.path:
        sys.path.remove(str(_folder))


def _source(module: ModuleType, beside: bool) -> Source | None:
    """Return a module's file; None for a namespace package or an extension module."""
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    depth = module.__name__.count(".") + (path.name == "__init__.py")
    name = path.relative_to(path.parents[depth]).as_posix()
    return Source(name=name, file=path, content=path.read_bytes(), beside=beside)


def _lies_in(module: ModuleType, folder: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(Path(place).resolve().is_relative_to(folder) for place in places if place)
