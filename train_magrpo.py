"""Train a team with MAGRPO: python train_magrpo.py --config configs/magrpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.launch import Run, Trainer, main


def build(run: Run) -> Trainer:
    from loggers.metrics import tree_metrics
    from trainers.magrpo import MAGRPOTrainer

    return MAGRPOTrainer(run.section, run.team, run.rollout, run.loop, run.sampling, tree_metrics)


if __name__ == "__main__":
    sys.exit(main("magrpo", build))
