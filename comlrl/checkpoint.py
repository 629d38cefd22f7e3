"""Atomic checkpoints: everything is written beside, flushed, and renamed into place.

``checkpoints/step_NNNNNN/`` holds ``state.json``, one ``.safetensors`` file for each component
and ``checksums.json`` over all of them. A folder whose sums do not match is damaged and passed by.
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
from safetensors.torch import load_file, save_file

Tensors = Mapping[str, torch.Tensor]
SUMS = "checksums.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the one before is untouched."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A good checkpoint, read."""

    path: Path
    state: Mapping[str, Any]
    tensors: Mapping[str, dict[str, torch.Tensor]]  # component → its tensors


def save(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensors],
    limit: int | None = None,
) -> Path:
    """Write ``checkpoints/step_NNNNNN``; then remove the oldest beyond ``limit``.

    Raises CheckpointError where the disk does not take it; nothing that was there is lost.
    """
    folder = run_dir / "checkpoints"
    final, partial = folder / f"step_{step:06d}", folder / f".partial_{step:06d}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, component in tensors.items():
            contiguous = {k: v.detach().cpu().contiguous() for k, v in component.items()}
            save_file(contiguous, str(partial / f"{name}.safetensors"))
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        sums = {file.name: _sum(file) for file in sorted(partial.iterdir())}
        (partial / SUMS).write_text(json.dumps(sums, indent=1))
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _flush(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} could not be saved: {error}") from error
    for old in _folders(run_dir)[: -limit if limit else None] if limit else []:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(run_dir: Path, warn: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest good checkpoint of a run, or None; damaged ones are told to ``warn``."""
    for path in reversed(_folders(run_dir)):
        reason = _damage(path)
        if reason is None:
            state = json.loads((path / "state.json").read_text())
            files = sorted(path.glob("*.safetensors"))
            return Checkpoint(path, state, {f.stem: load_file(str(f)) for f in files})
        warn(f"checkpoint {path} is damaged ({reason}); the one before is used")
    return None


def _folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def _damage(path: Path) -> str | None:
    try:
        sums = json.loads((path / SUMS).read_text())
        for name, expected in sums.items():
            if _sum(path / name) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def _sum(file: Path) -> str:
    with file.open("rb") as handle:
        return (
            hashlib.file_digest(handle, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(handle.read()).hexdigest()
        )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
