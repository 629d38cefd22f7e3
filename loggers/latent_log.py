"""``latents.jsonl``: the latents of SHPPO's agents, for the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comlrl import files
from comlrl.loop.records import Logger, LogMark, LogRecord
from comlrl.types import Domain, RolloutResult


class LatentLogger(Logger):
    """Logger of one line per agent and training state: step, turn, role and the latent's mean μ.

    Writes no file if completions have no latents.
    """

    def __init__(self, path: Path, domain: Domain) -> None:
        self._path, self._domain = path, domain

    def begin(self, mark: LogMark) -> None:
        files.keep(self._path, lambda _, line: line["step"] <= mark.env_steps)

    def episodes(self, record: LogRecord, trees: Sequence[RolloutResult]) -> None:
        if record.phase != "train":
            return
        lines = [line for tree in trees for line in self._lines(tree, record.step)]
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def _lines(self, tree: RolloutResult, step: int) -> Iterator[dict[str, Any]]:
        for number, agent, turn in tree.answered():
            if (latent := turn.completions_G[0].latent) is not None:
                role = self._domain.roles(tree.num_agents)[agent]
                mu = [round(x, 5) for x in latent.mu_K.tolist()]
                yield {"step": step, "turn": number, "role": role, "mu": mu}
