"""Train a team with MADPO: python train_madpo.py --config configs/madpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.config.algorithms import MADPOConfig
from comlrl.loop.parts import Trainer
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring.assembly import Run, build_collector


def build(run: Run[MADPOConfig]) -> Trainer:
    from comlrl.trainers.madpo import MADPOTrainer

    return MADPOTrainer(run.section, run.team, run.loop, run.sampling, build_collector(run))


if __name__ == "__main__":
    sys.exit(main("madpo", build))
