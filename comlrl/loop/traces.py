"""Restores the folder of a run that was refused, or ended before it learned anything.

No empty folder remains, and the next run can use the same name.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from comlrl.run_files import API, CHECKPOINTS, FINAL_MODEL, METRICS, PREFERENCES, SUMMARY

# Files worth keeping even if no training step was logged.
RESULTS = (
    SUMMARY, f"{CHECKPOINTS}/step_*", FINAL_MODEL, PREFERENCES, "reward_model",
    "non_finite_batch.safetensors", f"{API}/*/*.jsonl",
)  # fmt: skip


@dataclass(frozen=True)
class FolderSnapshot:
    """The content of a run's folder before the run began."""

    folder: Path
    names: frozenset[str]
    missing: tuple[Path, ...]  # the folder and its parents that did not exist, innermost first

    @classmethod
    def from_folder(cls, folder: Path) -> FolderSnapshot:
        names = (
            frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()
        )
        above = (folder, *folder.parents)
        return cls(folder, names, tuple(path for path in above if not path.exists()))

    def restore(self) -> None:
        """Remove everything newer than the snapshot, unless the folder has results."""
        if not self.folder.is_dir() or _has_results(self.folder):
            return
        for path in list(self.folder.iterdir()):
            if path.name in self.names:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run may use a parent folder
            for path in self.missing:
                path.rmdir()


def _has_results(folder: Path) -> bool:
    if any(next(folder.glob(pattern), None) for pattern in RESULTS):
        return True
    file = folder / METRICS
    return file.is_file() and '"phase": "train"' in file.read_text(encoding="utf-8")  # or torn
