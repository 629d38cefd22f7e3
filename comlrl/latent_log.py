"""``latents.jsonl``: where SHPPO's agents are in latent space, for the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from comlrl import distributed
from comlrl.prompts import helper_names
from comlrl.types import Node


class LatentLog:
    """A line for each agent at each state: step, turn, role and the mean of its latent."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "latents.jsonl"

    def start(self) -> None:
        """A new run: what an older one left goes."""
        if distributed.is_main():
            self.path.unlink(missing_ok=True)

    def keep_until(self, env_steps: int) -> None:
        """On resume: what was logged behind the checkpoint, whole or torn, goes."""
        if distributed.is_main() and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            kept = [line for line in whole if json.loads(line)["step"] <= env_steps]
            self.path.write_text("".join(kept))

    def write(self, env_steps: int, nodes_S: Sequence[Node], mu_SNK: torch.Tensor) -> None:
        """All processes' states; a collective call."""
        own = [
            {"step": env_steps, "turn": node.turn, "role": role, "mu": [round(x, 5) for x in mu_K]}
            for node, mu_NK in zip(nodes_S, mu_SNK.tolist(), strict=True)
            for role, mu_K in zip((*helper_names(len(mu_NK)), "main"), mu_NK, strict=True)
        ]
        lines = [line for part in distributed.everyone(own) for line in part]
        if distributed.is_main():
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
