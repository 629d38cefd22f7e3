"""The arena's command: refusals, equal budgets, cells that are finished, and real runs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import train_magrpo
from comlrl.trainers.launch.commands import arena, arena_cells
from comlrl.trainers.launch.commands.arena import check, parse, plan
from comlrl.trainers.launch.commands.arena_cells import ALGORITHMS, TASKS
from comlrl.trainers.launch.cost.tree_size import growth
from tests.support.processes import until

ROOT = Path(__file__).parents[4]
OWN = """
import sys
from dataclasses import dataclass
from comlrl.config import algorithms as configs
from comlrl.trainers.launch.commands.train import main

@dataclass(frozen=True)
class BestConfig(configs.CommonConfig):
    pass

if __name__ == "__main__":
    sys.exit(main("best", lambda run: None, section=BestConfig))
"""


def planned(folder: Path, *more: str) -> arena.Arena:
    return plan(parse(["--out", str(folder), *more]))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--algorithms", "magrpo,mapo"], ["--algorithms: 'mapo'", "did you mean `mappo`?"]),
        (["--tasks", "climb"], ["--tasks: 'climb'", "did you mean `climbing`?"]),
        (["--tasks", "x"], ["--tasks: 'x'", "codebook, climbing"]),
        (["--joint-actions", "100"], ["--joint-actions: 100", "at least 128"]),
        (["--seeds", "0"], ["--seeds: 0", "at least 1"]),
        (["--jobs", "0"], ["--jobs: 0", "at least 1"]),
        (["--budget", "7"], ["command line", "--budget"]),
        (["--algorithms", "best=missing.py"], ["--algorithms: 'missing.py' does not exist"]),
        (["--algorithms", f"magrpo={ROOT}/train_magrpo.py"], ["--algorithms: 'magrpo="]),
        (["--algorithms", f"mappo={ROOT}/train_magrpo.py"], ["--algorithms: 'mappo="]),
        (["--algorithms", f"../best={ROOT}/train_magrpo.py"], ["--algorithms: '../best="]),
        (["--algorithms", "best="], ["--algorithms: '' does not exist"]),
        (["--check", "missing.py"], ["--check", "--algorithms NAME=FILE"]),
        (
            ["--algorithms", "madpo", "--tasks", "lock-sparse"],
            ["madpo.num_turns: 3", "num_turns must be 1"],
        ),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(given, named, tmp_path, capsys):
    assert arena.main(["--out", str(tmp_path / "a"), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(part in line for part in named)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300])
def test_a_path_that_cannot_be_a_folder_is_one_line(place, tmp_path, capsys):
    (tmp_path / "file").touch()
    cell = ["--algorithms", "magrpo", "--tasks", "climbing", "--seeds", "1"]
    assert arena.main(["--out", str(tmp_path / place), *cell]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and place in line


def test_what_an_algorithm_cannot_take_has_a_reason(tmp_path):
    plan = planned(tmp_path, "--seeds", "1")
    assert "reward.by_agent: 'own'" in str(check(plan, "madpo", "dilemma"))
    assert "sequential" in str(check(plan, "magrpo-cross", "codebook"))
    assert "--seeds 2" in str(check(plan, "magrpo", "levers"))
    plan = planned(tmp_path, "--seeds", "2")
    assert "share one" in str(check(plan, "ippo-shared", "levers"))
    assert tuple(check(plan, "magrpo", "levers")) == pytest.approx((1 / 9, 0.9))
    # sparse: 9^−3, both write at random for three turns
    assert tuple(check(plan, "mappo", "lock-sparse")) == pytest.approx((9**-3, 1.0))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_cell_scores_the_joint_actions_that_are_asked_for(name, tmp_path):
    """Of the two kinds: those that end by steps, and those whose rounds label candidates."""
    plan, algorithm = planned(tmp_path, "--joint-actions", "1024"), ALGORITHMS[name]
    for task in ("climbing", "chores"):
        section = plan.cell(name, task, 1).tree[algorithm.trained_by]
        if "num_iterations" in section:
            candidates = section["round_tasks"] * section["preference_num_candidates"]
            # MARLHF: as many again online
            assert section["num_iterations"] * candidates * algorithm.stages == 1024
        else:
            agents, count = section["num_agents"], section["num_generations"]
            joint = count**agents if section.get("joint_mode") == "cross" else count
            assert section["max_steps"] * section["batch_size"] * joint == 1024


def test_all_policies_have_one_learning_rate(tmp_path):
    plan, rates = planned(tmp_path), set()
    for name, algorithm in ALGORITHMS.items():
        for task in TASKS:
            tree = plan.cell(name, task, 1).tree
            online = "magrpo" if algorithm.stages == 2 else algorithm.trained_by
            rates.add(tree[online]["learning_rate"])
    assert len(rates) == 1


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("madpo", "marlhf")])
def test_trees_are_at_most_16_joint_actions_or_the_least_that_compares(name, tmp_path):
    """Two completions of each agent over three turns, all combined: 4 + 16 + 64 = 84."""
    plan, algorithm = planned(tmp_path), ALGORITHMS[name]
    for task in TASKS:
        section = plan.cell(name, task, 1).tree[algorithm.trained_by]
        known = arena_cells.SECTIONS[algorithm.trained_by]
        names = {field.name for field in fields(known)}
        scored = growth(
            known(**{key: value for key, value in section.items() if key in names})
        ).joint_actions
        three_turns = name == "magrpo-cross" and section["num_turns"] == 3
        assert scored == 84 if three_turns else 8 < scored <= 16, task
        assert (section["max_steps"] - 1) * 8 * scored < 6_400 <= section["max_steps"] * 8 * scored


@pytest.mark.parametrize(
    ("task", "states"), [("climbing", 8), ("codebook", 8 * 16), ("lock-dense", 8 * (1 + 5 + 5))]
)
@pytest.mark.parametrize("name", ["ippo", "shppo"])
def test_ppo_and_shppo_make_four_updates_of_a_step(name, task, states, tmp_path):
    """Two passes of two minibatches: in order a state for each joint action, in chains for each
    turn of each."""
    tree = planned(tmp_path).cell(name, task, 1).tree[ALGORITHMS[name].trained_by]
    assert tree["ppo_epochs"] == 2 and tree["train_batch_size"] == states / 2


def finish(plan: arena.Arena, name: str, task: str, seed: int, reward: float) -> None:
    """A cell as a finished run leaves it."""
    cell = plan.cell(name, task, seed)
    for file in (cell.config, cell.run / "summary.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
    cell.config.write_text(cell.text)
    metrics = {"reward_mean": reward, "reward_std": 0.8}
    summary = {"eval_end": metrics, "env_steps": 1024, "wall_seconds": 9.0}
    (cell.run / "summary.json").write_text(json.dumps(summary))


def test_finished_cells_are_read_and_not_run_again(tmp_path, capsys, monkeypatch):
    given = ["--algorithms", "magrpo,madpo", "--tasks", "dilemma", "--seeds", "2"]
    given += ["--joint-actions", "1024"]
    plan = planned(tmp_path, *given)
    finish(plan, "magrpo", "dilemma", 1, 1.0)
    finish(plan, "magrpo", "dilemma", 2, 2.0)
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started
    assert arena.main(["--out", str(tmp_path), *given]) == 0
    text, progress = capsys.readouterr()
    assert "2 cells, 2 finished before" in progress
    assert "— madpo, dilemma: reward.by_agent" in text
    found = json.loads((tmp_path / "arena.json").read_text())
    magrpo, madpo = found["table"]
    # scores (1 − 1) / 2 and (2 − 1) / 2; noise 0.8 / √256 / 2
    assert magrpo["mean"] == 0.25 and magrpo["deviation"] == pytest.approx(0.125**0.5)
    assert magrpo["noise"] == pytest.approx(0.025)
    assert madpo["mean"] is None and "madpo cannot learn from" in madpo["reasons"][0]
    assert [cell["score"] for cell in found["cells"]] == [0.0, 0.5, None, None]
    assert "| magrpo" in (tmp_path / "arena.md").read_text()
    assert (tmp_path / "arena.png").stat().st_size > 5000


def test_levers_are_scored_with_strangers(tmp_path):
    given = ["--algorithms", "magrpo", "--tasks", "levers", "--seeds", "2"]
    plan = planned(tmp_path, *given)
    for seed in (1, 2):
        finish(plan, "magrpo", "levers", seed, 1.0)
    (tmp_path / "cross_play").mkdir()
    matrix = {"matrices": {"reward_mean": [[1.0, 0.2], [0.4, 1.0]]}}
    (tmp_path / "cross_play" / "magrpo_levers_1_2.json").write_text(json.dumps(matrix))
    assert arena.main(["--out", str(tmp_path), *given]) == 0
    cells = json.loads((tmp_path / "arena.json").read_text())["cells"]
    assert [cell["value"] for cell in cells] == pytest.approx([0.3, 0.3])
    assert cells[0]["score"] == pytest.approx((0.3 - 1 / 9) / (0.9 - 1 / 9))
    assert (cells[0]["floor"], cells[0]["optimum"]) == pytest.approx((1 / 9, 0.9))
    assert cells[0]["noise"] is None  # that of play with itself says nothing of it


def test_a_cross_play_that_fails_is_a_reason_and_the_rest_is_written(tmp_path, capsys):
    given = ["--algorithms", "magrpo", "--tasks", "levers,climbing", "--seeds", "2"]
    plan = planned(tmp_path, *given)
    for task, seed in itertools.product(("levers", "climbing"), (1, 2)):
        finish(plan, "magrpo", task, seed, 1.0)  # without weights that could play
    assert arena.main(["--out", str(tmp_path), *given]) == 0
    levers, climbing = json.loads((tmp_path / "arena.json").read_text())["table"]
    assert levers["mean"] is None and levers["reasons"][0].startswith(
        "cross-play: exit code 2: error: "
    )
    assert climbing["mean"] is not None


def test_another_budget_needs_another_folder(tmp_path, capsys):
    given = ["--algorithms", "magrpo", "--tasks", "climbing", "--seeds", "1"]
    finish(planned(tmp_path, *given), "magrpo", "climbing", 1, 1.0)
    assert arena.main(["--out", str(tmp_path), *given, "--joint-actions", "256"]) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_a_script_of_ones_own_is_named_on_the_command_line(tmp_path):
    script = tmp_path / "train_best.py"
    script.write_text(OWN)
    plan = planned(tmp_path, "--algorithms", f"best={script}")
    assert list(plan.algorithms) == ["best"]
    tree = plan.cell("best", "climbing", 1).tree
    assert tree["best"]["num_generations"] == 16 and "magrpo" not in tree
    both = planned(tmp_path, "--algorithms", f"magrpo, best={script}")
    assert list(both.algorithms) == ["magrpo", "best"]


@pytest.mark.slow
def test_a_script_under_another_name_is_refused(tmp_path, capsys):
    script = tmp_path / "train_best.py"
    script.write_text(OWN)
    given = ["--algorithms", f"worst={script}", "--tasks", "climbing", "--seeds", "1"]
    assert arena.main(["--out", str(tmp_path / "out"), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "worst" in line


@pytest.mark.slow
def test_another_version_of_a_script_needs_another_folder(tmp_path, capsys):
    script = tmp_path / "train_best.py"
    script.write_text(OWN)
    given = ["--algorithms", f"best={script}", "--tasks", "climbing", "--seeds", "1"]
    plan = planned(tmp_path / "out", *given)
    finish(plan, "best", "climbing", 1, 1.0)
    script.write_text(OWN + "\n# another\n")
    assert arena.main(["--out", str(tmp_path / "out"), *given]) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_two_quick_cells_learn(tmp_path, monkeypatch):
    """In this process, with a sixth of the budget: agents with their own rewards defect, and with
    the mean of both they cooperate. At random they score 0.625."""

    def train(plan: arena.Arena, cells: list[arena.Cell]) -> dict[str, str]:
        for cell in cells:
            cell.config.parent.mkdir(parents=True, exist_ok=True)
            cell.config.write_text(cell.text)
            given = ["--config", str(cell.config)]
            assert train_magrpo.main("magrpo", train_magrpo.build, given) == 0
        return {}

    monkeypatch.setattr(arena, "run", train)
    monkeypatch.setattr(arena_cells, "EPISODES", 64)
    given = ["--algorithms", "magrpo", "--tasks", "dilemma,dilemma-shared", "--seeds", "1"]
    given += ["--joint-actions", "1024", "--out", str(tmp_path)]
    assert arena.main(given) == 0
    own, shared = json.loads((tmp_path / "arena.json").read_text())["cells"]
    assert own["joint_actions"] == shared["joint_actions"] == 1024
    assert own["score"] < 0.4 and shared["score"] > 0.75


@pytest.fixture
def quick(monkeypatch):
    """Cells of a few seconds."""
    for name, value in (("BATCH", 2), ("TREE", 4), ("EPISODES", 16)):
        monkeypatch.setattr(arena_cells, name, value)


@pytest.mark.slow
def test_real_cells_run_at_once_and_a_failed_one_is_run_again(quick, tmp_path, capsys):
    given = ["--algorithms", "magrpo,mappo", "--tasks", "climbing", "--seeds", "1"]
    given += ["--joint-actions", "16", "--out", str(tmp_path), "--jobs", "2"]
    assert arena.main(given) == 0
    found = json.loads((tmp_path / "arena.json").read_text())
    assert [cell["joint_actions"] for cell in found["cells"]] == [16, 16]
    assert all(-2 < cell["score"] <= 1 for cell in found["cells"])
    before = (tmp_path / "runs" / "mappo_climbing_1" / "summary.json").stat().st_mtime_ns
    (tmp_path / "runs" / "magrpo_climbing_1" / "summary.json").unlink()
    assert arena.main(given) == 0
    assert "2 cells, 1 finished before" in capsys.readouterr().err
    after = (tmp_path / "runs" / "mappo_climbing_1" / "summary.json").stat().st_mtime_ns
    assert before == after
    assert json.loads((tmp_path / "arena.json").read_text())["table"] == found["table"]


@pytest.mark.slow
def test_a_stopped_arena_ends_its_cells_and_continues(tmp_path):
    command = [sys.executable, str(ROOT / "arena.py"), "--algorithms", "magrpo"]
    command += ["--tasks", "climbing", "--seeds", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    started = tmp_path / "runs" / "magrpo_climbing_1" / "config.yaml"
    until(started.exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 130
    assert not (started.parent / "summary.json").exists()
