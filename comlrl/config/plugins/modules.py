"""The user's own modules: those beside a YAML file, and their files.

A module beside the file is imported under its plain name and before any of that name on the
Python path, together with the modules beside it that it imports, as they were when this process
first read them. Names of Python's and of this project's are never taken; nothing else beside the
file is served, and no bytecode is left there.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comlrl import files

PROJECT = Path(__file__).resolve().parents[3]
MODULES = "modules.json"  # of a run: the user's own modules, file → SHA-256


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of a user's module, as it was read."""

    module: str  # dotted
    root: Path  # the folder that ``module`` is counted from
    file: Path
    content: bytes
    beside: bool  # found beside the YAML file, not on the Python path

    @property
    def name(self) -> str:
        """The file from ``root``, e.g. ``pack/parts.py``."""
        return self.file.relative_to(self.root).as_posix()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def keep(folder: Path, sources: Sequence[Source]) -> None:
    """Copies of the files that lay beside the YAML, for a run that is to find them again, and the
    digests of all; nothing where there are none."""
    for source in sources:
        if source.beside:
            file = folder / source.name
            file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(file, source.content)
    if sources:
        files.replace(folder / MODULES, json.dumps(digests(sources), indent=1) + "\n")


def kept(folder: Path) -> dict[str, str]:
    """The digests that ``keep`` wrote, by file."""
    file = folder / MODULES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def digests(sources: Iterable[Source]) -> dict[str, str]:
    return {source.name: source.sha256 for source in sources}


def is_beside(module: str, folder: Path) -> bool:
    return _file(module, folder) is not None


def is_taken(module: str, folder: Path) -> bool:
    """Whether a module beside the YAML file would stand in the way of Python's or this project's,
    or of one that is at work already."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or (folder != PROJECT and (PROJECT / top).is_dir()):
        return True
    if top not in sys.modules or any(top in finder.names for finder in _finders()):
        return False
    file = getattr(sys.modules[top], "__file__", None)
    return file is None or not Path(file).resolve().is_relative_to(folder)


def sources_beside(module: str, folder: Path) -> tuple[Source, ...]:
    """A module's file beside the YAML file, and those there that it imports, functions' imports
    included, and so on; what is served already as it was first read."""
    known = {n: s for f in _finders() if f.folder == folder for n, s in f.sources.items()}
    return _reachable(module, folder, True, lambda name: not is_taken(name, folder), known)


def sources_on_path(module: str) -> tuple[Source, ...]:
    """An imported module's file, and those of the same package that it imports."""
    found = sys.modules[module]
    module = found.__name__  # it may have been asked for by another name of this project's
    parts = module.split(".")
    package = ".".join(parts[: 2 if parts[0] == "comlrl" else 1])
    file = getattr(found, "__file__", None)
    if file is None or not file.endswith(".py"):
        return ()
    path = Path(file).resolve()
    depth = module.count(".") + (path.name == "__init__.py")
    return _reachable(
        module, path.parents[depth], False, lambda name: f"{name}.".startswith(f"{package}."), {}
    )


def serve(folder: Path, sources: Sequence[Source]) -> None:
    """Let these be imported; those of another folder are so no longer."""
    new = {source.module: source for source in sources}
    for finder in _finders():
        if finder.folder == folder:
            new = finder.sources | new
        else:
            forget(finder.names)
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _Finder(folder, new))


def forget(modules: Iterable[str]) -> None:
    """Let them be read anew when they are next asked for."""
    for name in modules:
        sys.modules.pop(name, None)
        for finder in _finders():
            finder.sources.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules beside one YAML file."""

    def __init__(self, folder: Path, sources: dict[str, Source]) -> None:
        self.folder, self.sources = folder, sources
        self.names = {name for module in sources for name in _with_parents(module)}

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names:
            return None
        if fullname in self.sources:
            source = self.sources[fullname]
            return importlib.util.spec_from_file_location(
                fullname, source.file, loader=_Loader(source)
            )
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)  # no __init__.py
        spec.submodule_search_locations = [str(self.folder.joinpath(*fullname.split(".")))]
        return spec


class _Loader(importlib.abc.SourceLoader):
    """Runs a module from what was read of it."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def get_filename(self, fullname: str) -> str:
        return str(self.source.file)

    def get_data(self, path: object) -> bytes:
        return self.source.content


def _finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def _with_parents(module: str) -> list[str]:
    """``a.b.c`` → a, a.b, a.b.c."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _file(module: str, root: Path) -> Path | None:
    base = root.joinpath(*module.split("."))
    files = (base / "__init__.py", base.with_name(base.name + ".py"))
    return next((file for file in files if file.is_file()), None)


def _reachable(
    module: str,
    root: Path,
    beside: bool,
    wanted: Callable[[str], bool],
    known: Mapping[str, Source],
) -> tuple[Source, ...]:
    """The file of a module and of all that it imports from below ``root``, by name."""
    waiting, found, seen = [module], [], set()
    while waiting:
        for name in _with_parents(waiting.pop()):
            file = _file(name, root) if name not in seen and wanted(name) else None
            seen.add(name)
            if file is not None:
                read = Source(
                    module=name, root=root, file=file, content=file.read_bytes(), beside=beside
                )
                found.append(known.get(name, read))
                waiting += _imported(found[-1])
    return tuple(sorted(found, key=lambda source: source.name))


def _imported(source: Source) -> Iterator[str]:
    """Modules that may be meant by the imports in a file; none where it does not parse."""
    try:
        tree = ast.parse(source.content)
    except (SyntaxError, ValueError):
        return
    package = source.module.split(".")
    if source.file.name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
