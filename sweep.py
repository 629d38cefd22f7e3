"""Run a sweep without an account: python sweep.py FILE --jobs 2 (files: configs/sweeps/)

Reads W&B's sweep files. The same command, given again, continues where it was stopped.
"""

from __future__ import annotations

import sys

from comlrl.trainers.launch.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main())
