"""Generate pages of the site: the internals of each package, from its modules' docstrings.

A hook of mkdocs (``mkdocs.yml``). The sources are read, not imported.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("rewards", "external", "loggers", "trainers")  # as packages of comlrl


def packages() -> dict[str, list[str]]:
    """Return the modules of each package, itself first, without empty ones."""
    modules: dict[str, list[str]] = {}
    for package in ("comlrl", *LINKED):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.is_symlink():  # a train script
                continue
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = ("comlrl", *parts) if package in LINKED else parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if file.stat().st_size:
                modules.setdefault(".".join(parts[:-1]), []).append(name)
    return modules


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the internals to the navigation's last section, the reference."""
    assert config.nav is not None
    (reference,) = config.nav[-1].values()
    reference.append({"Internals": [{name: f"reference/{name}.md"} for name in packages()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each package, with all its modules."""
    for package, modules in packages().items():
        text = "".join(f"::: {module}\n\n" for module in modules)
        if modules[0] == package:
            text = text.replace("\n", "\n    options: {heading_level: 1}\n", 1)
        else:
            text = f"# {package}\n\n{text}"
        files.append(File.generated(config, f"reference/{package}.md", content=text))
    return files
