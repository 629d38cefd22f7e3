"""HumanEval's tasks, for the benchmarks that run its solutions."""

from __future__ import annotations

import argparse
import sys

from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError, report
from comlrl.rewards.code.domain import CODE
from comlrl.tasks.datasets import load_tasks
from comlrl.types import Task


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", default="openai/openai_humaneval", metavar="NAME",
        help="HumanEval: a hub name, or a file of JSON lines (default: %(default)s)",
    )  # fmt: skip


def tasks(data: str) -> list[Task]:
    """Return the tasks in order, with ``canonical_solution`` among their fields.

    Exits with code 2 and one line if they cannot be read.
    """
    try:
        return load_tasks(DatasetConfig(name=data), "test", CODE)
    except UserError as error:
        sys.exit(report(error))


def solution(task: Task) -> str:
    """Return the complete canonical program."""
    return task.fields["prompt"] + task.fields["canonical_solution"]
