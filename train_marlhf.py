"""Train a team with MARLHF: python train_marlhf.py --config configs/marlhf_quickstart.yaml"""

from __future__ import annotations

import sys

from trainers.launch.builders import marlhf as build
from trainers.launch.execution import main

if __name__ == "__main__":
    sys.exit(main("marlhf", build))
