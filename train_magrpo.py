"""Train a team with MAGRPO: python train_magrpo.py --config configs/magrpo_quickstart.yaml"""

from __future__ import annotations

import sys

from trainers.launch.builders import magrpo as build
from trainers.launch.execution import main

if __name__ == "__main__":
    sys.exit(main("magrpo", build))
