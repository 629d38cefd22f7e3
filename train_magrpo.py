"""Train a team with MAGRPO: python train_magrpo.py --config configs/magrpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.config.algorithms import MAGRPOConfig
from comlrl.loop.parts import Trainer
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring.assembly import Run


def build(run: Run[MAGRPOConfig]) -> Trainer:
    from comlrl.trainers.magrpo import MAGRPOTrainer

    return MAGRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling)


if __name__ == "__main__":
    sys.exit(main("magrpo", build))
