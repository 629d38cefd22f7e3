"""Train a team with MADPO: python train_madpo.py --config configs/madpo_quickstart.yaml"""

from __future__ import annotations

import sys

from trainers.launch.builders import madpo as build
from trainers.launch.execution import main

if __name__ == "__main__":
    sys.exit(main("madpo", build))
