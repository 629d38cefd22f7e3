"""Generated pages of the site: the API of each room, from its modules' docstrings.

A hook of mkdocs (``mkdocs.yml``). The sources are read, not imported.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("rewards", "external", "loggers", "trainers")  # as packages of comlrl


def rooms() -> dict[str, list[str]]:
    """Return the modules of each package, itself first, without empty ones."""
    found: dict[str, list[str]] = {}
    for package in ("comlrl", *LINKED):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.is_symlink():  # a train script
                continue
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = ("comlrl", *parts) if package in LINKED else parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if file.stat().st_size:
                found.setdefault(".".join(parts[:-1]), []).append(name)
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the reference to the navigation."""
    pages = [{room: f"reference/{room}.md"} for room in rooms()]
    config.nav = [*(config.nav or []), {"API": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each package, with all its modules."""
    for room, modules in rooms().items():
        text = "".join(f"::: {module}\n\n" for module in modules)
        if modules[0] == room:
            text = text.replace("\n", "\n    options: {heading_level: 1}\n", 1)
        else:
            text = f"# {room}\n\n{text}"
        files.append(File.generated(config, f"reference/{room}.md", content=text))
    return files
