"""A loop as runs have it, on tasks of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comlrl.loop.cadence import Cadence
from comlrl.loop.evaluations import Evaluations
from comlrl.loop.loop import Loop
from comlrl.loop.records import Logger
from comlrl.loop.run_log import RunLog
from comlrl.loop.task_schedule import TaskSchedule
from comlrl.rewards.code.domain import CODE
from comlrl.types import Task


def loop(
    section: Any,
    tasks: Sequence[Task],
    run_dir: Path,
    logger: Logger,
    *,
    evaluate: Any = None,
    seed: int = 0,
    schedule: TaskSchedule | None = None,
) -> Loop:
    """``schedule``: None: shuffled epochs of all tasks. ``evaluate``: None: never."""
    epochs = TaskSchedule(tasks, section.batch_size, section.num_train_epochs, seed)
    evaluations = None
    if evaluate is not None:
        evaluations = Evaluations(evaluate, Cadence(section.eval_interval))
    log = RunLog(logger, CODE)
    return Loop(
        section,
        schedule or epochs,
        run_dir,
        log,
        evaluations=evaluations,
    )
