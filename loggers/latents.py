"""``latents.jsonl``: where SHPPO's agents are in latent space, for the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from comlrl import files
from comlrl.types import AgentTurn, Domain, LogMark, LogRecord, Node, Tree


class LatentLogger:
    """A line for each agent at each training state: step, turn, role and the mean of its latent.

    No file where completions carry no latents.
    """

    def __init__(self, path: Path, domain: Domain) -> None:
        self._path, self._domain = path, domain

    def begin(self, mark: LogMark) -> None:
        files.keep(self._path, lambda _, line: line["step"] <= mark.env_steps)

    def log(self, record: LogRecord) -> None:
        """Nothing: metrics have a file of their own."""

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None:
        if record.phase != "train":
            return
        lines = [
            {
                "step": record.step,
                "turn": node.turn,
                "role": role,
                "mu": [round(x, 5) for x in latent.mu_K.tolist()],
            }
            for tree in trees
            for node in tree.nodes
            for turn, role in self._named(node)
            if (latent := turn.completions_G[0].latent) is not None
        ]
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def _named(self, node: Node) -> Iterator[tuple[AgentTurn, str]]:
        return zip(node.agents_N, self._domain.roles(len(node.agents_N)), strict=True)

    def close(self) -> None:
        """Nothing: the file is closed after each record."""
