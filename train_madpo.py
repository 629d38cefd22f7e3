"""Train a team with MADPO: python train_madpo.py --config configs/madpo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.types import Trainer
from trainers.launch.assembly import Run
from trainers.launch.execution import main


def build(run: Run) -> Trainer:
    from comlrl.preferences.collector import Collector
    from trainers.madpo import MADPOTrainer

    collector = Collector(
        run.section,
        run.rollout,
        run.loop,
        run.sampling,
        run.loop.course.tasks_of,
        seed=run.config.seed,
        resume=run.resume,
    )
    return MADPOTrainer(run.section, run.team, run.loop, run.sampling, collector)


if __name__ == "__main__":
    sys.exit(main("madpo", build))
