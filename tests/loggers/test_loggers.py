"""Loggers: real files, a real terminal's width, real offline W&B runs in their own processes."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
from rich.console import Console

from comlrl import loggers
from comlrl.files import read_lines
from comlrl.loggers.console import ConsoleLogger, shown
from comlrl.loggers.episode_log import EpisodeLogger
from comlrl.loggers.jsonl import JsonlLogger
from comlrl.loggers.samples import SampleLogger
from comlrl.loggers.trackio import TrackioLogger
from comlrl.loop.progress import Progress, clock
from comlrl.loop.records import Logger, LogMark, LogRecord
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.writing.writing_domain import WRITING
from tests.support.fakes import Clock, code_task
from tests.support.made_runs import (
    node,
    record,
    scored_tree,
    settings,
    tree,
)

ROOT = Path(__file__).parents[2]
L = TypeVar("L", bound=Logger)


def begun(logger: L, lines: int = 0, update: int = -1, env_steps: int = -1) -> L:
    """A logger of a fresh run, or of one that continues from a checkpoint."""
    logger.begin(LogMark(lines, update, env_steps))
    return logger


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_line_is_as_promised_and_on_disk_at_once(tmp_path):
    logger = begun(JsonlLogger(tmp_path / "m.jsonl"))
    logger.log(LogRecord(step=16, update=2, epoch=1, phase="eval", metrics={"reward_mean": 0.5}))
    text = (tmp_path / "m.jsonl").read_text()
    assert text == (
        '{"step": 16, "update": 2, "epoch": 1, "phase": "eval", "metrics": {"reward_mean": 0.5}}\n'
    )


def test_jsonl_has_null_for_what_is_not_finite(tmp_path):
    logger = begun(JsonlLogger(tmp_path / "m.jsonl"))
    logger.log(record(1, a=float("nan"), b=float("inf"), c=1.0))
    logger.close()
    assert lines(tmp_path / "m.jsonl")[0]["metrics"] == {"a": None, "b": None, "c": 1.0}


def test_resuming_drops_later_and_torn_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = begun(JsonlLogger(path))
    for update in range(4):
        logger.log(record(update))
    logger.close()
    with path.open("a") as file:
        file.write('{"step": 32, "upd')  # killed while writing
    resumed = begun(JsonlLogger(path), lines=2)
    resumed.log(record(2))
    resumed.close()
    assert [line["update"] for line in lines(path)] == [0, 1, 2]


def test_a_new_run_starts_an_empty_file(tmp_path):
    (tmp_path / "m.jsonl").write_text("old\n")
    begun(JsonlLogger(tmp_path / "m.jsonl")).close()
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_damage_within_a_file_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        list(read_lines(path))


def test_samples_keep_the_first_and_the_latest_evaluation(tmp_path):
    path = tmp_path / "samples.jsonl"
    logger = begun(SampleLogger(path, CODE))
    for update in (0, 5, 10):
        logger.episodes(record(update, "eval"), [scored_tree("a", update), scored_tree("b", 1, 3)])
    kept = lines(path)
    assert [(s["update"], s["task_id"]) for s in kept] == [(0, "a"), (0, "b"), (10, "a"), (10, "b")]
    assert kept[3]["reward_task_mean"] == 2.0  # of both joint actions
    assert kept[3]["completions_N"] == ["aux0", "main0"]
    assert kept[3]["facts"]["outcomes"][0]["actual"] == "3"


def test_samples_survive_a_resume(tmp_path):
    path = tmp_path / "samples.jsonl"
    logger = begun(SampleLogger(path, CODE))
    for update in (0, 5, 10):
        logger.episodes(record(update, "eval"), [scored_tree("a", update)])
    resumed = begun(SampleLogger(path, CODE), update=7)
    assert [s["update"] for s in lines(path)] == [0]
    resumed.episodes(record(8, "eval"), [scored_tree("a", 1)])
    assert [s["update"] for s in lines(path)] == [0, 8]


def test_samples_of_several_turns_follow_one_path(tmp_path):
    grown = tree(
        node([1.0, 2.0]),
        node([0.0, 3.0], turn=2, parent=0, parent_action=1),
        task=code_task("a", "prompt", "", "f"),
    )
    logger = begun(SampleLogger(tmp_path / "samples.jsonl", CODE))
    logger.episodes(record(1, "eval"), [grown])
    (kept,) = lines(tmp_path / "samples.jsonl")
    assert (kept["turn"], kept["rewards_T"]) == (2, [2.0, 0.0])


def test_without_evaluation_training_episodes_are_kept(tmp_path):
    logger = begun(SampleLogger(tmp_path / "samples.jsonl", CODE))
    for update in range(3):
        logger.episodes(record(update), [scored_tree(f"t{update}", 1.0)])
    logger.close()
    assert [s["task_id"] for s in lines(tmp_path / "samples.jsonl")] == ["t0", "t2"]


def test_episodes_hold_everything_and_rotate(tmp_path):
    path = tmp_path / "episodes.jsonl"
    logger = begun(EpisodeLogger(path, CODE, rotate_bytes=1000))
    for update in range(4):
        logger.episodes(record(update), [scored_tree("a", 1.0, 2.0)])
    logger.close()
    files = sorted(tmp_path.glob("episodes*"))
    assert len(files) > 2
    kept = [line for file in files for line in lines(file)]
    assert sorted(line["update"] for line in kept) == [0, 0, 1, 1, 2, 2, 3, 3]
    first = next(line for line in kept if line["joint_action"] == 1)
    assert first["completions_N"] == ["aux1", "main1"]
    assert first["roles_N"] == ["aux", "main"]
    assert first["prompts_N"][0] == [{"role": "user", "content": "do"}]
    assert (first["reward"], first["processed_reward"]) == (2.0, 1.0)
    assert first["facts"]["program"] == "p"
    begun(EpisodeLogger(path, CODE, rotate_bytes=1000), update=1).close()
    kept = [line for file in tmp_path.glob("episodes*") for line in lines(file)]
    assert {line["update"] for line in kept} == {0, 1}
    begun(EpisodeLogger(path, CODE)).close()  # a new run: nothing of the old one is left
    assert [file.name for file in tmp_path.glob("episodes*")] == ["episodes.jsonl"]


def test_a_rotation_overwrites_no_file(tmp_path):
    logger = begun(EpisodeLogger(tmp_path / "episodes.jsonl", CODE, rotate_bytes=1))
    for update in range(2):
        logger.episodes(record(update), [scored_tree("a", 1.0)])
    (tmp_path / "episodes.1.jsonl").unlink()  # by the user, for room
    logger.episodes(record(2), [scored_tree("a", 1.0)])
    logger.close()
    assert [lines(tmp_path / f"episodes.{n}.jsonl")[0]["update"] for n in (2, 3)] == [1, 2]


def ten_steps(clock: Clock) -> Progress:
    """A run of ten training steps after the third; each took 40 s."""
    progress = Progress(clock)
    for step in (1, 2, 3):
        clock.now += 40
        progress.reach(step, 10, step / 10)
    return progress


def test_console_prints_a_line_a_record_where_there_is_no_terminal():
    out = io.StringIO()
    progress = ten_steps(Clock())
    logger = ConsoleLogger(progress, console=Console(file=out, width=40))
    logger.log(record(0, "eval", reward_mean=0.912))
    logger.log(record(1, reward_mean=1.25, tokens_per_second=2345.6, tasks_seen=16))
    progress.begin("training")
    progress.begin("evaluating")
    logger.close()
    first, second, third = out.getvalue().splitlines()  # never wrapped, whatever the width
    # 7 steps of 40 s: 280 s
    assert first == "eval  0/10  env steps 0  epoch 0  reward 0.91  left 0:04:40"
    assert second == (
        "train 1/10  env steps 8  epoch 0  tasks 16  reward 1.25  tok/s 2,346  left 0:04:40"
    )
    assert third == "evaluating  left 0:04:40"


def test_console_table_on_a_terminal():
    out, clock = io.StringIO(), Clock()
    progress = ten_steps(clock)
    console = Console(file=out, force_terminal=True, width=99, color_system=None)
    logger = ConsoleLogger(progress, title="[demo]", console=console)
    logger.log(record(0, "eval", reward_mean=0.912))
    progress.reach(3, 10, 0.3)
    progress.begin("evaluating")
    for seconds, share in ((5, 0.25), (10, 0.5)):
        clock.now += seconds
        progress.part(share)
    logger.log(record(2, reward_mean=1.25, tokens_per_second=2345.6))
    text = out.getvalue()
    text = text[text.rindex("[demo]") :]
    run, work, *table = text.splitlines()
    assert "3/10" in run and "30% 0:04:40" in run
    assert "evaluating" in work and "50% 0:00:20" in work
    assert "1.25" in "".join(table) and "2,346" in "".join(table)
    logger.close()
    assert "\x1b[?25h" in out.getvalue()  # the cursor is shown again


def test_console_shows_the_task_s_reward_of_a_training_that_maximizes_a_score():
    """So that it can be compared with what evaluations show."""
    trained = record(1, reward_mean=-0.05, task_reward_mean=1.5)
    evaluated = record(0, "eval", reward_mean=1.77, model_score_mean=0.06)
    for terminal, expected in (
        (False, ("reward 1.77  score 0.06", "reward 1.50  score -0.05")),
        (True, ("1.77   0.06", "1.50  -0.05")),
    ):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=99, color_system=None)
        logger = ConsoleLogger(ten_steps(Clock()), console=console)
        for one in (evaluated, trained):
            logger.log(one)
        logger.close()
        for words in expected:
            assert words in out.getvalue()


def test_clock():
    assert [clock(s) for s in (5, 65, 3725)] == ["0:00:05", "0:01:05", "1:02:05"]


def test_tensorboard_scalars(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    from comlrl.loggers.tensorboard import TensorBoardLogger

    logger = begun(TensorBoardLogger(tmp_path))
    logger.log(record(1, reward_mean=1.5, kl=float("nan")))
    logger.log(record(2, "eval", reward_mean=2.5))
    logger.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["train/reward_mean", "eval/reward_mean"]
    assert [(e.step, e.value) for e in events.Scalars("eval/reward_mean")] == [(16, 2.5)]
    # From a checkpoint after the first record, at step 8.
    resumed = begun(TensorBoardLogger(tmp_path), env_steps=8)
    resumed.log(record(2, reward_mean=3.5))
    resumed.close()
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [(8, 1.5), (16, 3.5)]
    assert events.Scalars("eval/reward_mean") == []


def test_build_gives_what_the_configuration_asks_for(tmp_path, capsys):
    progress = Progress()
    progress.reach(0, 3, 0.0)
    asked = settings(output=SimpleNamespace(verbose=True))
    built = begun(loggers.build(asked, CODE, CODE.roles(2), tmp_path / "run", progress))
    built.log(record(1))
    built.episodes(record(1), [scored_tree("a", 1.0)])
    built.close()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "samples.jsonl", "episodes.jsonl", "environment.json"} <= names
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["python"]
    assert json.loads((tmp_path / "run" / "domain.json").read_text()) == {
        "domain": "code", "roles": ["aux", "main"], "greatest_reward": 4.0
    }  # fmt: skip
    assert "train 1/3" in capsys.readouterr().out
    again = loggers.build(asked, CODE, CODE.roles(2), tmp_path / "run", progress, resume=True)
    begun(again, lines=0, update=0).close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "run" / "episodes.jsonl").read_text() == ""


def test_a_programs_roles_are_its_own(tmp_path):
    """Of a team that the domain does not have."""
    loggers.build(settings(domain="writing"), WRITING, ["solo"], tmp_path, Progress()).close()
    assert json.loads((tmp_path / "domain.json").read_text())["roles"] == ["solo"]


WANDB_RUN = """
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from comlrl import loggers
from comlrl.loop.progress import Progress
from comlrl.loop.records import LogMark
from comlrl.rewards.code.domain import CODE
from tests.support.made_runs import record, scored_tree, settings
mode, folder, resume = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "resume"
section = SimpleNamespace(project="comlrl-test", entity=None, name=None, dir=None, tags=["t"],
                          mode=None if mode == "default" else mode)
run = loggers.build(settings(wandb=section), CODE, CODE.roles(2), folder, Progress(), resume=resume)
run.begin(LogMark(int(resume), 100, 100))
run.log(record(1))
run.episodes(record(1, "eval"), [scored_tree("a", 1.0)])
run.close()
"""


def wandb_run(folder: Path, mode: str, resume: str = "new", **environment: str):
    """A run in its own process, with no login but what ``environment`` gives it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    kept |= {"HOME": str(folder.parent), "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, mode, str(folder), resume],
        env=kept,
        capture_output=True,
        text=True,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "metrics.jsonl").read_text().count("\n") == 1 + (resume == "resume")
    return done


def test_wandb_without_login_is_off_with_one_line(tmp_path):
    done = wandb_run(tmp_path / "run", "default")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("notice: W&B: off: no login")
    assert not (tmp_path / "run" / "wandb.json").exists()


@pytest.mark.slow
def test_wandb_offline_and_resumed_is_the_same_run(tmp_path):
    wandb_run(tmp_path / "run", "offline")
    run_id = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert written.name.endswith(run_id)
    tables = list(written.glob("files/media/table/eval/samples*.json"))
    assert json.loads(tables[0].read_text())["data"][0][1] == "a"
    wandb_run(tmp_path / "run", "offline", "resume")
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] == run_id


@pytest.mark.slow
def test_wandb_that_cannot_be_reached_does_not_stop_the_run(tmp_path):
    done = wandb_run(
        tmp_path / "run",
        "default",
        WANDB_API_KEY="a" * 40,
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert "W&B: not connected, so logging offline" in done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def logged_twice(folder: Path, **sections: SimpleNamespace) -> None:
    """A run of one record that is resumed for another."""
    asked = settings(**sections, to_dict=lambda: {"seed": 1, "magrpo": {"batch_size": 4}})
    for update, resume in ((1, False), (2, True)):
        run = loggers.build(asked, CODE, CODE.roles(2), folder, Progress(), resume=resume)
        run.begin(LogMark(update - 1, 100, 100))
        run.log(record(update, reward_mean=1.5 * update, kl=float("nan"), **{"pass@1": 0.5}))
        run.close()


TRACKIO_RUN = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.loggers.test_loggers import logged_twice
folder = Path(sys.argv[1])
section = SimpleNamespace(project="arena", name=None, dir=str(folder / "store"))
logged_twice(folder / "run", trackio=section)
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("arena")
assert name.startswith("run-"), name
assert [(row["step"], row["train/reward_mean"]) for row in SQLiteStorage.get_logs("arena", name)] \
    == [(8, 1.5), (16, 3.0)]
"""


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": "old"}'])
def test_a_torn_name_of_trackio_begins_another_run(content, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda *_, **__: None))
    file = tmp_path / "trackio.json"
    file.write_text(content)
    section = SimpleNamespace(project="p", name="new", dir=None)
    TrackioLogger(section, {}, tmp_path, resume=True)
    assert json.loads(file.read_text()) == {"name": "old" if "old" in content else "new"}


def test_trackio_resumed_is_the_same_run(tmp_path):
    """In its own process: Trackio reads its folder once."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("needs trackio")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRACKIO_")}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO_RUN, str(tmp_path)],
        env=kept | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "* " not in done.stdout  # its own lines
    show = f"TRACKIO_DIR={tmp_path / 'store'} trackio show --project arena"
    assert done.stderr.count(f"`{show}` shows it") == 2
    assert (tmp_path / "store" / "arena.db").exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_commands_only_work_is_shown_beside_its_output(monkeypatch, terminal):
    out, clock = io.StringIO(), Clock()
    screen = Console(file=out, width=99, force_terminal=terminal)
    monkeypatch.setattr("comlrl.loggers.console.Console", lambda **_: screen)
    progress = Progress(clock)
    with shown(progress, "evaluating"):
        for seconds, share in ((5, 0.25), (90, 0.5)):
            clock.now += seconds
            progress.part(share)
    if terminal:
        assert "evaluating" in out.getvalue() and "0:03:00" in out.getvalue()
    else:
        assert out.getvalue() == "evaluating 50%, 0:03:00 to go\n"


def test_no_color_leaves_no_escape_codes(monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    progress = Progress(Clock())
    with shown(progress, "evaluating"):
        progress.part(0.25)
    logger = ConsoleLogger(progress, title="run")
    logger.log(record(1))
    logger.close()
    captured = capsys.readouterr()
    assert "train" in captured.out and "\x1b" not in captured.out + captured.err


def test_rewards_of_agents_stand_in_progress_lines(capsys):
    columns = (("aux reward", "agent_0/reward_mean", "{:.2f}"),)
    logger = ConsoleLogger(Progress(Clock()), columns=columns)
    metrics = {"reward_mean": 1.5, "agent_0/reward_mean": 0.25}
    logger.log(replace(record(1), metrics=metrics))
    assert "reward 1.50  aux reward 0.25" in capsys.readouterr().out
