"""``best_model/``: the weights of the evaluation with the highest held-out reward.

It is written to a temporary folder and renamed into place, so that a kill leaves either the old or
the new one. Its ``best.json`` describes the evaluation; a resumed run loads it to compare later
evaluations with the model on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from comlrl import files
from comlrl.processes import distributed
from comlrl.run_files import BEST_MODEL

FACTS = "best.json"
PARTIAL, OLD = f".{BEST_MODEL}.partial", f".{BEST_MODEL}.old"


class BestModel:
    """The best evaluation of a run so far."""

    def __init__(self, run_dir: Path, save: Callable[[Path], None]) -> None:
        """Set up the store. ``save`` writes the current weights into a folder; all processes call
        it."""
        self.run_dir, self.save = run_dir, save
        self.facts: dict[str, float] | None = None  # of the evaluation; None: there was none yet

    def resume(self) -> None:
        """Continue with the best model of an earlier process. A collective call."""
        self.facts = distributed.from_main(self._recover)

    def offer(self, facts: dict[str, float]) -> None:
        """Save the current weights if ``facts["reward_mean"]`` exceeds that of all earlier ones.

        A collective call; ``facts`` must be equal on all processes.
        """
        if self.facts is not None and facts["reward_mean"] <= self.facts["reward_mean"]:
            return

        def save(folder: Path) -> None:
            self.save(folder)
            if distributed.is_main():
                files.replace(folder / FACTS, json.dumps(facts, indent=1) + "\n")

        replace_folder(self.run_dir / BEST_MODEL, save)
        self.facts = dict(facts)

    def _recover(self) -> dict[str, float] | None:
        final, partial, old = (self.run_dir / name for name in (BEST_MODEL, PARTIAL, OLD))
        if not final.exists() and (partial / FACTS).exists():  # killed between two renames
            files.put_in_place(partial, final, old)
        files.remove(partial)
        files.remove(old)
        return json.loads((final / FACTS).read_text(encoding="utf-8")) if final.exists() else None


def replace_folder(path: Path, save: Callable[[Path], None]) -> None:
    """Write a folder with ``save``, which all processes call, and rename it to ``path``."""
    partial, old = (path.with_name(f".{path.name}.{state}") for state in ("partial", "old"))
    if distributed.is_main():
        files.remove(partial)
    save(partial)
    if distributed.is_main():
        files.put_in_place(partial, path, old)
