"""Lookup of the configurations, sweeps and train scripts that ship with the package."""

from __future__ import annotations

from pathlib import Path

from comlrl.config.algorithms import SECTIONS
from comlrl.errors import UserError, near

LAUNCH = __package__.removesuffix(".checks")  # `python -m LAUNCH` runs the command `comlrl`
CONFIGS = (Path(__file__).parents[1] / "configs").resolve()  # in a checkout, the root's configs/


def config_file(name: str | Path, option: str = "--config", folder: Path = CONFIGS) -> Path:
    """Return the path of a YAML file or, if it does not exist, of the shipped file of that name.

    ``magrpo_quickstart``, ``magrpo_quickstart.yaml`` and ``configs/magrpo_quickstart.yaml`` name
    the same shipped file. Raises UserError, naming ``option``, for a name that is neither.
    """
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    shipped = folder / f"{path.name.removesuffix('.yaml')}.yaml"
    inside = Path(CONFIGS.name, *folder.relative_to(CONFIGS).parts)
    if path.parent in (Path(), inside) and shipped.is_file():
        return shipped
    if path.parent != Path() or path.suffix:
        return path  # the reader reports that it is missing
    names = [file.stem for file in folder.glob("*.yaml")]
    hint = near(path.name, names, "name a YAML file, or see docs/configuration.md")
    raise UserError(f"{option}: '{name}' is neither a file nor a shipped configuration; {hint}")


def train_command(script: str) -> list[str] | None:
    """Return the command line of a shipped train script, even without a checkout; None: there is no
    such script."""
    if Path(script).is_file():
        return [script]
    algorithm = Path(script).stem.removeprefix("train_")
    if script != f"train_{algorithm}.py" or algorithm not in SECTIONS:
        return None
    return ["-m", LAUNCH, "train", algorithm]
