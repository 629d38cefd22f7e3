"""``comlrl``, the command of the installed package; ``python -m trainers.launch`` is the same.

What a command needs is imported when it is called.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version

from comlrl.config.algorithms import SECTIONS
from comlrl.errors import print_error
from comlrl.files import tolerant_terminal

USAGE = f"""\
usage: comlrl COMMAND … (each answers --help)

  train ALGORITHM --config NAME_OR_FILE   {", ".join(SECTIONS)}
  evaluate --checkpoint RUN               also baselines and cross-play
  sweep NAME_OR_FILE                      the points of a search, as runs
  arena [--algorithms …] [--tasks …]      a scorecard of algorithms on small games
  report RUN [RUN …]                      a run, or several compared, as one page
  export RUN [--merge] [--push REPO]      weights, for use elsewhere
  --version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    tolerant_terminal()
    words = list(sys.argv[1:] if argv is None else argv)
    count = 2 if words[:1] == ["train"] else 1
    command = " ".join(words[:count])
    if command in ("", "-h", "--help", "train", "train -h", "train --help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"comlrl {version('comlrl')}")
        return 0
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean `comlrl {near[0]}`?" if near else "see comlrl --help"
        print_error(f"command line: there is no `comlrl {command}`; {hint}")
        return 2
    sys.argv = [f"comlrl {command}", *words[count:]]  # as its usage and environment.json say it
    return COMMANDS[command]()


def train(algorithm: str) -> int:
    """Run the train script itself, which lies beside the package ``trainers``."""
    beside = __package__.removesuffix("trainers.launch")
    try:
        runpy.run_module(f"{beside}train_{algorithm}", run_name="__main__")
    except SystemExit as done:  # all scripts end so
        return int(done.code or 0)
    return 0


def evaluate() -> int:
    from trainers.launch.commands.evaluate import main

    return main()


def sweep() -> int:
    from trainers.launch.commands.sweep import main

    return main()


def arena() -> int:
    from trainers.launch.commands.arena import main

    return main()


def report() -> int:
    from trainers.launch.commands.report import main

    return main()


def export() -> int:
    from trainers.launch.commands.export import main

    return main()


COMMANDS: dict[str, Callable[[], int]] = {
    **{f"train {algorithm}": partial(train, algorithm) for algorithm in SECTIONS},
    **{command.__name__: command for command in (evaluate, sweep, arena, report, export)},
}

if __name__ == "__main__":
    sys.exit(main())
