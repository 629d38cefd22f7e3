"""Evaluate runs, models and baselines: python evaluate.py --checkpoint RUN"""

from __future__ import annotations

import sys

from comlrl.trainers.launch.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
