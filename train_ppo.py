"""Train with PPO, or a team with MAPPO: python train_ppo.py --config configs/ppo_quickstart.yaml"""

from __future__ import annotations

import sys

from trainers.launch.builders import ppo as build
from trainers.launch.execution import main

if __name__ == "__main__":
    sys.exit(main("ppo", build))
