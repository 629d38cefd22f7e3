"""Atomic checkpoints: written to a temporary folder, flushed, and renamed into place.

``checkpoints/step_NNNNNN/`` contains ``state.json``, one ``.safetensors`` file for each component,
and ``checksums.json`` of all files. A folder with wrong checksums is damaged and skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from comlrl import files
from comlrl.errors import UserError, notice
from comlrl.loop.cadence import Cadence
from comlrl.loop.parts import Part
from comlrl.processes import distributed
from comlrl.quoting import one_line
from comlrl.run_files import CHECKPOINTS, STATE

Tensors = Mapping[str, torch.Tensor]
SUMS = "checksums.json"


def tensors_of(part: Part) -> Tensors:
    """Return a part's state for a checkpoint."""
    return part.state_dict() if isinstance(part, torch.nn.Module) else part.state_tensors()


def load_part(part: Part, tensors: dict[str, torch.Tensor]) -> None:
    """Load what ``tensors_of`` returned."""
    if isinstance(part, torch.nn.Module):
        part.load_state_dict(tensors)
    else:
        part.load_tensors(tensors)


def short(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__


class CheckpointError(UserError):
    """A checkpoint could not be written; earlier ones are unchanged."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of an undamaged checkpoint."""

    path: Path
    state: Mapping[str, Any]
    tensors: Mapping[str, dict[str, torch.Tensor]]  # component → its tensors


class Checkpoints:
    """Writes a run's checkpoints and keeps track of the newest."""

    def __init__(self, run_dir: Path, cadence: Cadence, limit: int | None) -> None:
        """Set up the checkpoints. ``limit``: how many are kept; None: all."""
        self.run_dir, self.cadence, self.limit = run_dir, cadence, limit
        self._parts: Mapping[str, Part] | None = None  # of the running trainer
        self.newest: tuple[int, Path] | None = None  # number of training steps, and path

    @property
    def steps(self) -> int:
        """Return the number of training steps of the newest checkpoint; 0 if there is none."""
        return self.newest[0] if self.newest is not None else 0

    @property
    def parts(self) -> Mapping[str, Part]:
        assert self._parts is not None, "no trainer has begun"
        return self._parts

    def begin(self, parts: Mapping[str, Part]) -> None:
        """Set the parts of the running trainer, which ``save`` will store."""
        self._parts = parts

    def save(self, steps: int, state: Mapping[str, Any], *, alone: bool = False) -> Path:
        """Write a checkpoint after ``steps`` training steps and return its path. A collective call
        unless ``alone``, which is for the main process."""
        tensors = {name: tensors_of(part) for name, part in self.parts.items()}

        def write() -> Path:
            return save(self.run_dir, steps, state, tensors, self.limit)

        path = write() if alone else distributed.from_main(write)
        self.newest = (steps, path)
        return path

    def resume(self, checkpoint: Checkpoint, steps: int, parts: Mapping[str, Part]) -> None:
        """Load a checkpoint of ``steps`` training steps into a trainer's parts.

        Raises UserError if it does not fit them.
        """
        try:
            for name, part in parts.items():
                load_part(part, checkpoint.tensors[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"--resume: {checkpoint.path} does not fit this configuration: {short(error)}"
            ) from error
        self.newest = (steps, checkpoint.path)


def save(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensors],
    limit: int | None = None,
) -> Path:
    """Write ``checkpoints/step_NNNNNN``, then remove the oldest ones beyond ``limit``.

    Raises CheckpointError if writing fails; earlier checkpoints are then unchanged.
    """
    folder = run_dir / CHECKPOINTS
    final, partial = folder / f"step_{step:06d}", folder / f".partial_{step:06d}"
    try:
        for torn in folder.glob(".partial_*"):  # left by killed processes
            files.remove(torn)
        partial.mkdir(parents=True)
        _write(partial, state, tensors)
        if final.exists():  # damaged, so that the run resumed from an earlier one
            files.remove(final)
        partial.rename(final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        before = [path for path in _folders(run_dir) if _damage(path) is None]
        fallback = f"{before[-1]} is untouched" if before else "there is none before it"
        raise CheckpointError(
            f"checkpoint {final} could not be saved: {reason}; {fallback}"
        ) from error
    if limit is not None:
        for old in [path for path in _folders(run_dir) if path.name <= final.name][:-limit]:
            files.remove(old)
    return final


def newest(run_dir: Path, warn: Callable[[str], None] = notice) -> Path | None:
    """Return the newest undamaged checkpoint of a run, or None; report damaged ones to ``warn``."""
    for path in reversed(_folders(run_dir)):
        reason = _damage(path)
        if reason is None:
            return path
        warn(f"checkpoint {path} is damaged ({reason}); the one before is used")
    return None


def read(path: Path) -> Checkpoint:
    """Read an undamaged checkpoint, with tensors on the CPU. Raises UserError if ``save`` did not
    write it, although its checksums are correct."""
    parts = sorted(path.glob("*.safetensors"))
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("state.json holds no mapping")
        return Checkpoint(path, state, {part.stem: load_file(str(part)) for part in parts})
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"--resume: {path} cannot be read: {one_line(str(error))}") from error


def _write(folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensors]) -> None:
    """Write all files and their checksums, and flush them to disk."""
    for name, component in tensors.items():
        contiguous = {k: v.detach().cpu().contiguous() for k, v in component.items()}
        save_file(contiguous, str(folder / f"{name}.safetensors"))
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    sums = {file.name: _sum(file) for file in sorted(folder.iterdir())}
    (folder / SUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    for file in folder.iterdir():
        _flush(file)
    _flush(folder)


def _folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / CHECKPOINTS).glob("step_*"))


def _damage(path: Path) -> str | None:
    try:
        sums = json.loads((path / SUMS).read_text(encoding="utf-8"))
        names = {file.name for file in path.iterdir()} - {SUMS}
        if not isinstance(sums, dict) or sums.keys() != names or STATE not in names:
            return f"{SUMS} is not of its files"
        for name, expected in sums.items():
            if _sum(path / name) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, RecursionError) as error:
        return " ".join(str(error).split())
    return None


def _sum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
