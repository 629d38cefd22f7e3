"""Train a team with SHPPO: python train_shppo.py --config configs/shppo_quickstart.yaml"""

from __future__ import annotations

import sys

from trainers.launch.builders import shppo as build
from trainers.launch.execution import main

if __name__ == "__main__":
    sys.exit(main("shppo", build))
