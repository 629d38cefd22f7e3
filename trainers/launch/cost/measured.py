"""``--dry-run --measure``: training steps on this machine, extrapolated to the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.files import read_lines
from comlrl.run_files import METRICS, SUMMARY
from comlrl.trainers.launch.cost.dry_run import schedule_of, steps_of
from comlrl.trainers.launch.wiring.assembly import build_schedule

STEPS = 2


def overrides(config: Config, folder: Path) -> Iterator[str]:
    """Yield the settings that make a run a measurement of its first steps.

    Rounds of preferences are limited to the tasks of these steps.
    """
    online = config.online_name
    yield from (f"output.dir={folder}", "output.save_final_model=false", "output.save_best=false")
    yield from ("wandb=null", "trackio=null", f"{online}.logging_steps=1")
    yield from (f"{online}.max_steps={STEPS}", f"{online}.max_env_steps=null")
    yield f"{online}.save_steps=0"
    if config.online.eval_interval:  # evaluate before and after the steps
        yield f"{online}.eval_interval={STEPS}"
    section = config.section
    if section.rounds is not None:
        tasks = STEPS * section.batch_size
        if section.rounds.tasks is not None:
            tasks = min(tasks, section.rounds.tasks)
        yield f"{config.algorithm}.round_tasks={tasks}"
        yield f"{online}.num_train_epochs={STEPS}"
    if section.fits_reward_model:
        yield f"{config.algorithm}.reward_min_accuracy=0"  # few pairs are no basis for stopping


def describe_measured(config: Config, measured: Config, folder: Path, tasks: int) -> str:
    """Return a table of the seconds of the steps in ``folder``, extrapolated to the run.

    Args:
        config: the run's configuration.
        measured: the same configuration with ``overrides``.
        tasks: the number of training tasks.

    Raises UserError if no step was completed.
    """
    records = list(read_lines(folder / METRICS))
    steps = [r["metrics"] for r in records if "step_seconds" in r["metrics"]]
    if not steps:
        raise UserError("--measure: no training step was made; see the messages above")
    last = steps[-1]
    schedule = schedule_of(config.section, tasks, config.seed)
    count = steps_of(config.online, tasks, schedule)
    heads = [f"step {i}" for i in range(1, len(steps) + 1)]
    run = "the run" if count is None else f"the run, {count:,} steps"
    rows = [["measured on this machine", *heads, run]]
    names = [key[len("time/") : -len("_share")] for key in last if key.startswith("time/")]
    for name in [*names, "a training step"]:
        each = [step["step_seconds"] * step.get(f"time/{name}_share", 1.0) for step in steps]
        run_seconds = None if count is None else each[0] + (count - 1) * each[-1]
        rows.append([name, *map(duration, each), duration(run_seconds)])
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    empty = [""] * (len(steps) - 1)
    others = []  # seconds of the run outside the steps
    if schedule is not None:  # labelling and fitting a reward model precede the first step
        before = max(summary["train"]["seconds"] - sum(s["step_seconds"] for s in steps), 0.0)
        labelled = build_schedule(measured.section, range(tasks), config.seed).length_of(0)
        labels = sum(schedule.length_of(index) for index in range(schedule.rounds))
        others.append(before * (labels / labelled))
        rows.append(["preferences", duration(before), *empty, duration(others[-1])])
    if passes := sum(record["phase"] == "eval" for record in records):
        each_pass, evaluations = summary["evaluation_seconds"] / passes, None
        if count is not None:
            evaluations = each_pass * (1 + math.ceil(count / config.online.eval_interval))
            others.append(evaluations)
        rows.append(["evaluations", duration(each_pass), *empty, duration(evaluations)])
    if schedule is not None or passes:
        total = None if run_seconds is None else run_seconds + math.fsum(others)
        rows.append(["together", "", *empty, duration(total)])
    memory = f"{last['peak_memory_mb']:,.0f} MB"
    widths = (26, *(14 for _ in heads), 24)
    table = [
        "".join(f"{cell:<{w}}" if not i else f"{cell:>{w}}" for i, (cell, w) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    notes = (
        f"peak memory of a process: {memory}",
        "The run is the first step once and the last one for each of the others. Steps vary, above",
        "all with the length of completions. Loading and saving are not included.",
    )
    return "\n".join(["", *table, *notes])


def duration(seconds: float | None) -> str:
    """Format a duration in s, min or h with three significant digits."""
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
