"""Configurations, sweeps and train scripts that ship with the package and are found by name."""

from __future__ import annotations

from pathlib import Path

from comlrl.config.algorithms import SECTIONS
from comlrl.errors import UserError, near

LAUNCH = __package__.removesuffix(".checks")  # `python -m` this is the command `comlrl`
CONFIGS = (Path(__file__).parents[1] / "configs").resolve()  # in a checkout that is configs/


def config_file(name: str | Path, option: str = "--config", folder: Path = CONFIGS) -> Path:
    """Return the path of a YAML file, or of the shipped one of that name where there is no such
    file.

    ``magrpo_quickstart``, ``magrpo_quickstart.yaml`` and ``configs/magrpo_quickstart.yaml`` are
    the same one. Raises UserError, naming ``option``, for a name that is neither.
    """
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    shipped = folder / f"{path.name.removesuffix('.yaml')}.yaml"
    inside = Path(CONFIGS.name, *folder.relative_to(CONFIGS).parts)
    if path.parent in (Path(), inside) and shipped.is_file():
        return shipped
    if path.parent != Path() or path.suffix:
        return path  # whoever reads it says that it is not there
    names = [file.stem for file in folder.glob("*.yaml")]
    hint = near(path.name, names, "name a YAML file, or see docs/configuration.md")
    raise UserError(f"{option}: '{name}' is neither a file nor a shipped configuration; {hint}")


def train_command(script: str) -> list[str] | None:
    """Return the command line of a train script, also where only the package is installed; None:
    there is no such script."""
    if Path(script).is_file():
        return [script]
    algorithm = Path(script).stem.removeprefix("train_")
    if script != f"train_{algorithm}.py" or algorithm not in SECTIONS:
        return None
    return ["-m", LAUNCH, "train", algorithm]
