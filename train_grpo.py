"""Train one agent with GRPO: python train_grpo.py --config configs/grpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.config.algorithms import GRPOConfig
from comlrl.loop.parts import Trainer
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring.assembly import Run


def build(run: Run[GRPOConfig]) -> Trainer:
    from comlrl.trainers.grpo import GRPOTrainer

    return GRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling)


if __name__ == "__main__":
    sys.exit(main("grpo", build))
