"""``summary.json``: what a run came to."""

from __future__ import annotations

import json
import os
import resource
from typing import TYPE_CHECKING

import torch

from comlrl import distributed

if TYPE_CHECKING:
    from comlrl.launch import Run


def write_summary(run: Run) -> None:
    """Write it (on the main process); a collective call under torchrun."""
    counters = run.loop.counters
    in_sync = distributed.in_sync(_trained(run))
    if not distributed.is_main():
        return
    seconds = counters.train_seconds
    summary = {
        "algorithm": run.config.algorithm,
        "env_steps": counters.env_steps,
        "updates": counters.updates,
        "wall_seconds": run.loop.wall_seconds,
        "eval_start": counters.eval_start,
        "eval_end": counters.eval_end,
        "eval_best": run.loop.best.facts if run.loop.best is not None else None,
        "scored_joint_actions": counters.scored_joint_actions,
        "train": {
            "joint_actions_per_second": counters.scored_joint_actions / seconds
            if seconds
            else None,
            "tokens_per_second": counters.sampled_tokens / seconds if seconds else None,
            "seconds": seconds,
            "peak_memory_mb": peak_memory_mb(),
        },
        "distributed": {"world_size": distributed.world_size(), "weights_in_sync": in_sync},
    }
    partial = run.run_dir / ".summary.json.partial"
    partial.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(partial, run.run_dir / "summary.json")


def _trained(run: Run) -> list[torch.Tensor]:
    """All that is trained and must be alike on all processes: weights, optimizers, critics."""
    assert run.loop.trainer is not None
    components = run.loop.trainer.state_tensors()
    return [tensor for component in components.values() for tensor in component.values()]


def peak_memory_mb() -> float:
    """The card's peak allocation, or, where none is used, the process's peak resident memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
