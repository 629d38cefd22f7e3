"""How long a run still takes, by a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comlrl.loggers import Loggers
from comlrl.loop import checkpoint
from comlrl.loop.loop import ENV_STEPS, Loop
from comlrl.loop.progress import EVALUATING, TRAINING, Progress, Remaining, Written
from comlrl.loop.steps import Gathered
from comlrl.types import Task
from tests.support import loops
from tests.support.fakes import Clock


def does(progress: Progress, clock: Clock, work: str, seconds: float) -> None:
    progress.begin(work)
    clock.now += seconds
    progress.end()


def test_steps_evaluations_and_saves_at_their_own_pace():
    clock = Clock()
    progress = Progress(clock)
    progress.remaining = Remaining(2, 10, evaluations=2, saves=3)
    assert progress.seconds_left() is None  # nothing is known of a training step
    does(progress, clock, "evaluating", 50)
    assert progress.seconds_left() is None
    for seconds in (300, 30, 34):  # the first one compiled and filled caches: the median is 34
        does(progress, clock, "training", seconds)
    does(progress, clock, "saving", 4)
    assert progress.seconds_left() == 8 * 34 + 2 * 50 + 3 * 4
    progress.begin("training")
    clock.now += 20
    assert progress.seconds_left() == 8 * 34 - 20 + 2 * 50 + 3 * 4
    clock.now += 100  # longer than usual: this step may end at any moment
    assert progress.seconds_left() == 7 * 34 + 2 * 50 + 3 * 4


def test_the_last_evaluation_is_time_left():
    clock = Clock()
    progress = Progress(clock)
    progress.remaining = Remaining(9, 10, evaluations=1)
    does(progress, clock, "evaluating", 50)
    does(progress, clock, "training", 5)
    progress.remaining = Remaining(10, 10, evaluations=1)
    progress.begin("evaluating")
    clock.now += 20
    assert (progress.work, progress.seconds_left()) == ("evaluating", 30)


def test_what_was_broken_off_is_not_measured():
    clock = Clock()
    progress = Progress(clock)
    progress.remaining = Remaining(1, 3, evaluations=1)
    does(progress, clock, "training", 10)
    progress.begin("evaluating")
    clock.now += 1
    progress.begin("saving")
    assert progress.typical("evaluating") is None
    resumed = Progress(clock)
    resumed.remaining = progress.remaining
    resumed.load(progress.state())
    assert resumed.seconds_left() == 20  # known before its first step


def loop(run_dir: Path = Path(), **section: Any) -> Loop:
    """Two epochs of three steps over six tasks, unless given otherwise; evaluated at 0, 4 and 6."""
    keys = {
        "batch_size": 2, "num_train_epochs": 2, "max_steps": None, "max_env_steps": None,
        "eval_interval": 4, "save_steps": 0, "save_total_limit": None, "logging_steps": 1,
    }  # fmt: skip
    tasks = [Task(f"t{i}") for i in range(6)]
    made = SimpleNamespace(**(keys | section))
    return loops.loop(made, tasks, run_dir, Loggers([]), evaluate=lambda: ([], {}))


@pytest.mark.parametrize(
    ("steps", "evaluated", "evaluations"),
    [(0, -1, 3), (0, 0, 2), (4, 0, 2), (4, 4, 1), (6, 4, 1), (6, 6, 0)],
)
def test_evaluations_to_come(steps, evaluated, evaluations):
    made = loop()
    made.counters.steps, made.counters.evaluated = steps, evaluated
    assert made.remaining == Remaining(steps, 6, evaluations=evaluations)


def test_checkpoints_to_come():
    made = loop(save_steps=2, eval_interval=0)
    assert made.remaining == Remaining(0, 6, saves=3)
    made.checkpoints.newest, made.counters.steps = (4, Path()), 5
    assert made.remaining == Remaining(5, 6, saves=1)


def test_checkpoints_come_with_evaluations_and_every_ten_minutes(tmp_path, monkeypatch):
    made, clock = loop(tmp_path, save_steps=None), Clock()
    monkeypatch.setattr("comlrl.loop.loop.time", SimpleNamespace(monotonic=lambda: clock.now))
    made._saved, clock.now = 0.0, 0.0
    saved = []
    for step in made.steps(SimpleNamespace(parts=dict)):
        clock.now += {2: 601.0}.get(step.index, 1.0)
        gathered = Gathered(trees=(), env_steps=8, scored=8, tokens=9, span=made.span(8))
        made.record(step, gathered, updates=1, metrics={})
        saved.append([path.name for path in (tmp_path / "checkpoints").glob("*")])
    saved.append([path.name for path in (tmp_path / "checkpoints").glob("*")])
    second, fourth, last = ["step_000002"], ["step_000004"], ["step_000006"]
    # As each step begins to be left, and at the end: evaluations are after the steps 4 and 6.
    assert saved == [[], [], second, second, fourth, fourth, last]


def test_environment_steps_alone_end_the_run():
    made = loop(num_train_epochs=None, max_env_steps=1100, eval_interval=0)
    assert made.remaining == Remaining(0, None)
    made.counters.steps, made.counters.env_steps = 3, 1024  # 1000 of them before the first step
    made.progress.note(ENV_STEPS, 8)
    # 76 environment steps are left, 8 a training step: 10 more, the last of them not full
    assert made.remaining == Remaining(3, 13, estimated=True)


def test_the_nearer_of_two_ends_counts():
    made = loop(max_env_steps=1000, eval_interval=0)
    assert made.remaining == Remaining(0, None)  # which one it is, the first step tells
    made.progress.note(ENV_STEPS, 8)
    assert made.remaining == Remaining(0, 6)


def test_a_loop_tells_what_it_does_and_measures_each(tmp_path):
    made = loop(tmp_path, save_steps=5)
    works: list[str] = []
    made.progress.listeners.append(works.append)
    trainer = SimpleNamespace(parts=dict)
    for step in made.steps(trainer):
        made.record(
            step,
            Gathered(trees=(), env_steps=8, scored=8, tokens=9, span=made.span(8)),
            updates=1,
            metrics={},
        )
        assert made.progress.work == ""  # what follows is not the step's
    train = ["training"] * 4
    assert works == ["evaluating", *train, "evaluating", "training", "saving", "training",
                    "evaluating", "saving"]  # fmt: skip
    counts = {name: len(recent) for name, recent in made.progress.state().items()}
    assert counts == {"evaluating": 3, "training": 6, "saving": 2, ENV_STEPS: 6}
    assert made.progress.seconds_left() == 0
    saved = checkpoint.read(checkpoint.newest(tmp_path))
    assert len(saved.state["progress"]["training"]) == 6


def test_a_work_that_says_how_far_it_is_is_reported_once_a_minute():
    clock, lines = Clock(), []
    progress = Progress(clock)
    progress.remaining = Remaining(0, 2, evaluations=2)
    progress.minutely.append(lines.append)
    for work, seconds in ((TRAINING, 40.0), (EVALUATING, 100.0)):
        progress.begin(work)
        clock.now += seconds
        progress.end()
    progress.begin(EVALUATING)
    written = Written(progress, total=8)
    assert progress.doing == "evaluating"
    for _ in range(6):  # three quarters, in 150 s
        clock.now += 25
        written(1.0)
    # the first after 75 s, three eighths done; the second after 150 s
    assert lines == ["evaluating 38%, 0:02:05 to go", "evaluating 75%, 0:00:50 to go"]
    # Two steps of 40 s, this evaluation's 50 s and another's 100 s.
    assert progress.seconds_left() == pytest.approx(80 + 50 + 100)
    written(7.0)  # never more than all
    assert progress.share == 1.0
    progress.end()
    assert progress.doing == ""


def test_the_first_token_is_no_pace():
    """Reading the prompts took a minute, and the text's 1,000 tokens will not."""
    clock = Clock()
    progress, lines = Progress(clock), []
    progress.minutely.append(lines.append)
    progress.remaining = Remaining(0, 0, evaluations=1)
    does(progress, clock, "evaluating", 100)
    progress.begin("evaluating")
    clock.now += 60
    progress.part(0.001)
    assert lines == ["evaluating 0%"] and progress.seconds_left() == 40
