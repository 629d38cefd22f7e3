"""``comlrl``, the installed command; ``python -m comlrl.trainers.launch`` is the same.

Each command imports its dependencies only when it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from comlrl.config.algorithms import SECTIONS
from comlrl.errors import near, print_error
from comlrl.files import tolerant_terminal

COMMANDS = ("evaluate", "sweep", "arena", "report", "export")
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
    if words[:1] in ([], ["-h"], ["--help"]) or words in (
        ["train"],
        ["train", "-h"],
        ["train", "--help"],
    ):
        print(USAGE)
        return 0
    if words[0] == "--version":
        print(f"comlrl {version('comlrl')}")
        return 0
    if words[0] in COMMANDS:
        module = importlib.import_module(f"comlrl.trainers.launch.commands.{words[0]}")
        return module.main(words[1:])
    if words[0] == "train" and words[1] in SECTIONS:
        from comlrl.trainers.launch.commands.train import main as train

        build = importlib.import_module(f"comlrl.train_{words[1]}").build
        return train(words[1], build, words[2:])
    trained = words[0] == "train"
    names = [f"train {algorithm}" for algorithm in SECTIONS] if trained else [*COMMANDS, "train"]
    command = " ".join(words[: 2 if trained else 1])
    hint = near(command, names, "see comlrl --help")
    print_error(f"command line: there is no `comlrl {command}`; {hint}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
