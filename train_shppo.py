"""Train a team with SHPPO: python train_shppo.py --config configs/shppo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.launch import Run, Trainer, main


def build(run: Run) -> Trainer:
    from comlrl.heterogeneous import LatentSampler
    from loggers.metrics import tree_metrics
    from trainers.shppo import SHPPOTrainer

    sampler = run.rollout.sampler
    assert isinstance(sampler, LatentSampler)
    return SHPPOTrainer(
        run.section, run.team, sampler, run.rollout, run.loop, run.sampling, tree_metrics
    )


if __name__ == "__main__":
    sys.exit(main("shppo", build))
