"""How long a run still takes, by a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comlrl.loggers import Loggers
from comlrl.loop.loop import Loop
from comlrl.loop.progress import EVALUATING, Progress, Written
from comlrl.loop.steps import Gathered
from comlrl.types import Task
from tests.support import loops
from tests.support.fakes import Clock


def loop(run_dir: Path, **section: Any) -> Loop:
    """Two epochs of three steps over six tasks, unless given otherwise; evaluated at 0, 4 and 6."""
    keys = {
        "batch_size": 2, "num_train_epochs": 2, "max_steps": None, "max_env_steps": None,
        "eval_interval": 4, "save_steps": 0, "save_total_limit": None, "logging_steps": 1,
    }  # fmt: skip
    tasks = [Task(f"t{i}") for i in range(6)]
    made = SimpleNamespace(**(keys | section))
    return loops.loop(made, tasks, run_dir, Loggers([]), evaluate=lambda: ([], {}))


def record(made: Loop, step: Any) -> None:
    gathered = Gathered(trees=(), env_steps=8, scored=8, tokens=9, span=made.span(8))
    made.record(step, gathered, updates=1, metrics={})


def test_the_time_left_follows_from_the_steps_after_the_first():
    clock = Clock()
    progress = Progress(clock)
    clock.now += 300  # the first step compiles and fills caches
    progress.reach(1, 10, 0.1)
    assert progress.seconds_left is None
    for step, seconds in ((2, 30), (3, 34)):
        clock.now += seconds
        progress.reach(step, 10, step / 10)
    assert progress.seconds_left == 7 * 32
    assert progress.position(3) == "3/10"


def test_checkpoints_come_with_evaluations_and_every_ten_minutes(tmp_path, monkeypatch):
    made, clock = loop(tmp_path, save_steps=None), Clock()
    monkeypatch.setattr("comlrl.loop.loop.time", SimpleNamespace(monotonic=lambda: clock.now))
    made._saved, clock.now = 0.0, 0.0
    saved = []
    for step in made.steps(SimpleNamespace(parts=dict)):
        clock.now += {2: 601.0}.get(step.index, 1.0)
        record(made, step)
        saved.append([path.name for path in (tmp_path / "checkpoints").glob("*")])
    saved.append([path.name for path in (tmp_path / "checkpoints").glob("*")])
    second, fourth, last = ["step_000002"], ["step_000004"], ["step_000006"]
    # As each step begins to be left, and at the end: evaluations are after the steps 4 and 6.
    assert saved == [[], [], second, second, fourth, fourth, last]


def test_environment_steps_alone_end_the_run(tmp_path):
    made = loop(tmp_path, num_train_epochs=None, max_env_steps=24, eval_interval=0)
    clock = Clock()
    made.progress = Progress(clock)
    for step in made.steps(SimpleNamespace(parts=dict)):
        clock.now += 10
        record(made, step)
        # 8 of 24 environment steps in 10 s, in whole seconds
        left = made.progress.seconds_left
        assert left is None if step.index == 1 else abs(left - (30 - 10 * step.index)) <= 1
        assert made.progress.position(step.index) == str(step.index)


def test_a_loop_tells_what_it_does(tmp_path):
    made = loop(tmp_path, save_steps=5)
    works: list[str] = []
    made.progress.tell = works.append
    for step in made.steps(SimpleNamespace(parts=dict)):
        record(made, step)
        assert made.progress.work == ""  # what follows is not the step's
    train = ["training"] * 4
    assert works == ["evaluating", *train, "evaluating", "training", "saving", "training",
                    "evaluating", "saving"]  # fmt: skip
    assert made.progress.seconds_left == 0


def test_a_work_that_says_how_far_it_is_is_reported_once_a_minute():
    clock, lines = Clock(), []
    progress = Progress(clock)
    progress.begin(EVALUATING)
    progress.tell = lines.append
    written = Written(progress, total=8)
    assert progress.doing == "evaluating"
    for _ in range(6):  # three quarters, in 150 s
        clock.now += 25
        written(1.0)
    # the first after 75 s, three eighths done; the second after 150 s
    assert lines == ["evaluating 38%, 0:02:05 to go", "evaluating 75%, 0:00:50 to go"]
    written(7.0)  # never more than all
    assert progress.doing == "evaluating 100%, 0:00:00 to go"
    progress.end()
    assert progress.doing == ""
