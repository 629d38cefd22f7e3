"""``best_model/``: the weights of the evaluation with the highest held-out reward.

It is written beside and renamed into place, so that a kill leaves the old one or the new one.
``best.json`` in it says which evaluation it is; a resumed run reads that again, and so keeps on
comparing with what lies on the disk.
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
        """Set up the keeper. ``save``: writes the present weights into a folder; called by all
        processes."""
        self.run_dir, self.save = run_dir, save
        self.facts: dict[str, float] | None = None  # of the evaluation; None: there was none yet

    def resume(self) -> None:
        """Continue with what an earlier process has left; called by all processes."""
        self.facts = distributed.from_main(self._recover)

    def offer(self, facts: dict[str, float]) -> None:
        """Keep the present weights where ``facts["reward_mean"]`` is above all before.

        Of equals the earlier stays. Called by all processes, with the same facts.
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
    """Write a folder beside ``path`` by ``save``, which all processes call, and rename it there."""
    partial, old = (path.with_name(f".{path.name}.{state}") for state in ("partial", "old"))
    if distributed.is_main():
        files.remove(partial)
    save(partial)
    if distributed.is_main():
        files.put_in_place(partial, path, old)
