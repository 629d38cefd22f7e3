"""``summary.json``: the results of a run."""

from __future__ import annotations

import json

from comlrl import files
from comlrl.loop import checkpoint
from comlrl.loop.loop import Loop
from comlrl.loop.steps import peak_memory_mb
from comlrl.processes import distributed
from comlrl.run_files import SUMMARY


def write_summary(loop: Loop, algorithm: str) -> None:
    """Write the summary on the main process. A collective call."""
    counters, evaluations = loop.counters, loop.evaluations
    best = None if evaluations is None else evaluations.best
    # Weights, optimizers and critics must be equal on all processes.
    components = [checkpoint.tensors_of(part) for part in loop.checkpoints.parts.values()]
    in_sync = distributed.in_sync(t for component in components for t in component.values())
    if not distributed.is_main():
        return
    seconds = counters.train_seconds
    summary = {
        "algorithm": algorithm,
        "env_steps": counters.env_steps,
        "updates": counters.updates,
        "wall_seconds": loop.wall_seconds,
        "evaluation_seconds": counters.evaluation_seconds,
        "eval_start": counters.eval_start,
        "eval_end": counters.eval_end,
        "eval_best": None if best is None else best.facts,
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
    files.replace(loop.run_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
