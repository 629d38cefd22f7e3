"""Train one agent with GRPO: python train_grpo.py --config configs/grpo_quickstart.yaml"""

from __future__ import annotations

import sys

from trainers.launch.builders import grpo as build
from trainers.launch.execution import main

if __name__ == "__main__":
    sys.exit(main("grpo", build))
