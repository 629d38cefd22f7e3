"""Finds the folder of a run, checks that it is free, and moves earlier runs aside."""

from __future__ import annotations

import os
from pathlib import Path

from comlrl.config.sections import OutputConfig
from comlrl.errors import UserError, notice
from comlrl.loop.run_lock import holder, refuse_in_use
from comlrl.run_files import BEST_MODEL, CHECKPOINTS, CONFIG, FINAL_MODEL, METRICS, SUMMARY

TRACES = (CONFIG, SUMMARY, METRICS, CHECKPOINTS, FINAL_MODEL, BEST_MODEL)


def holds_run(folder: Path) -> bool:
    """Return whether a folder contains files of a run that another would overwrite."""
    return any(os.path.lexists(folder / name) for name in TRACES)  # including broken links


def check_free(output: OutputConfig, resume: bool) -> None:
    """Raise UserError if ``output.dir`` contains an active run, or one that is to be neither
    resumed nor moved aside."""
    folder = output.dir
    if folder is not None:
        refuse_in_use(Path(folder))
    if folder is None or resume or output.overwrite or not holds_run(Path(folder)):
        return
    raise UserError(
        f"output.dir: '{folder}' holds a run; add --resume to continue it, choose another folder, "
        f"or set output.overwrite=true, which moves all of it to '{_beside(Path(folder))}'"
    )


def find(output: OutputConfig, name: str, resume: bool) -> Path:
    """Return ``output.dir``, or else a free folder of this name under ``base_dir``, numbered if
    others exist; with ``resume`` the last of those that are not free.

    Raises UserError if the run to resume is active.
    """
    if output.dir is not None:
        return Path(output.dir)
    base = Path(output.base_dir) / name
    taken = [base, *(base.with_name(f"{base.name}_{n}") for n in range(2, 10_000))]
    free = next(i for i, path in enumerate(taken) if not holds_run(path) and not holder(path))
    if not resume:
        if free:
            notice(f"output.base_dir: '{base}' holds a run; this one is written to '{taken[free]}'")
        return taken[free]
    newest = taken[max(0, free - 1)]
    refuse_in_use(newest)
    return newest


def move_aside(folder: Path) -> Path:
    """Rename the folder of a run to a free name and return it."""
    aside = _beside(folder)
    try:
        return folder.rename(aside)
    except OSError as error:
        raise UserError(
            f"output.dir: '{folder}' cannot be moved to '{aside}' ({error.strerror}); choose "
            "another folder"
        ) from error


def make_writable(folder: Path, key: str = "output.dir") -> Path:
    """Make a folder and return it. Raises UserError, naming ``key``, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # commands that share the folder probe it too
    except OSError as error:
        raise UserError(
            f"{key}: '{folder}' cannot be written ({error.strerror}); choose another folder"
        ) from error
    return folder


def _beside(folder: Path) -> Path:
    folder = folder.resolve()
    numbered = (folder.with_name(f"{folder.name}.{n}") for n in range(1, 10_000))
    return next(path for path in numbered if not path.exists())
