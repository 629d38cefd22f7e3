"""Train a team with MADPO: python train_madpo.py --config configs/madpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.launch import Run, Trainer, main


def build(run: Run) -> Trainer:
    from comlrl.collection import Collector
    from comlrl.generation import order
    from trainers.madpo import MADPOTrainer

    collector = Collector(
        run.section,
        run.rollout,
        run.loop,
        run.sampling,
        order,
        seed=run.config.seed,
        resume=run.resume,
    )
    return MADPOTrainer(run.section, run.team, run.loop, run.sampling, collector)


if __name__ == "__main__":
    sys.exit(main("madpo", build))
