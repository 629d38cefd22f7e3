"""Train one agent with GRPO: python train_grpo.py --config configs/grpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.types import Trainer
from trainers.launch.assembly import Run
from trainers.launch.execution import main


def build(run: Run) -> Trainer:
    from trainers.grpo import GRPOTrainer

    return GRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling)


if __name__ == "__main__":
    sys.exit(main("grpo", build))
