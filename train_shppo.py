"""Train a team with SHPPO: python train_shppo.py --config configs/shppo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.config.algorithms import SHPPOConfig
from comlrl.loop.parts import Trainer
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring.assembly import Run, heterogeneous_policy


def build(run: Run[SHPPOConfig]) -> Trainer:
    from comlrl.trainers.shppo import SHPPOTrainer

    policy = heterogeneous_policy(run.rollout.sampler)
    assert policy is not None, "SHPPO's section has one"
    return SHPPOTrainer(run.section, run.team, policy, run.rollout, run.loop, run.sampling)


if __name__ == "__main__":
    sys.exit(main("shppo", build))
