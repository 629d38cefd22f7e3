"""Train a team with SHPPO: python train_shppo.py --config configs/shppo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.types import Trainer
from trainers.launch.assembly import Run
from trainers.launch.execution import main


def build(run: Run) -> Trainer:
    from trainers.shppo import SHPPOTrainer

    policy = run.rollout.sampler.policy  # type: ignore[attr-defined]
    return SHPPOTrainer(run.section, run.team, policy, run.rollout, run.loop, run.sampling)


if __name__ == "__main__":
    sys.exit(main("shppo", build))
