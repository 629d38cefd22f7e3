"""Train one agent with GRPO: python train_grpo.py --config configs/grpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.launch import Run, Trainer, main


def build(run: Run) -> Trainer:
    from loggers.metrics import tree_metrics
    from trainers.grpo import GRPOTrainer

    return GRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling, tree_metrics)


if __name__ == "__main__":
    sys.exit(main("grpo", build))
