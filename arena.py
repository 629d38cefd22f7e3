"""Compare algorithms on the arena's tasks: python arena.py --tasks climbing,chores --seeds 3

The same command, given again, runs only the cells that are missing.
"""

from __future__ import annotations

import sys

from comlrl.trainers.launch.commands.arena import main

if __name__ == "__main__":
    sys.exit(main())
