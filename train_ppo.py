"""Train with PPO, or a team with MAPPO: python train_ppo.py --config configs/ppo_quickstart.yaml"""

from __future__ import annotations

import sys

from comlrl.config.algorithms import PPOConfig
from comlrl.loop.parts import Trainer
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring.assembly import Run, build_critic_team


def build(run: Run[PPOConfig]) -> Trainer:
    from comlrl.trainers.ppo import PPOTrainer

    critics = build_critic_team(run.config, run.section, run.team)
    return PPOTrainer(
        run.section, run.team, run.rollout, run.loop, run.sampling, critic_team=critics
    )


if __name__ == "__main__":
    sys.exit(main("ppo", build))
