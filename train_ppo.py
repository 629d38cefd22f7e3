"""Train with PPO, or a team with MAPPO: python train_ppo.py --config configs/ppo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.launch import Run, Trainer, main


def build(run: Run) -> Trainer:
    from loggers.metrics import tree_metrics
    from trainers.ppo import PPOTrainer

    return PPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling, tree_metrics)


if __name__ == "__main__":
    sys.exit(main("ppo", build))
