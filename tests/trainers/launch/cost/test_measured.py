"""``--dry-run --measure``: what it multiplies, and real runs that leave nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from comlrl.errors import UserError
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.cost.measured import describe_measured, duration, overrides
from tests.support.runs import ROOT, SHIPPED, Zygote, load, resolved, small_of


def written(folder: Path, *steps: tuple[float, float], seconds: float = 0.0) -> Path:
    """A run's files. ``steps``: seconds, and the rollout's share of them."""
    rows = [
        {"step_seconds": s, "time/rollout_share": r, "time/update_share": 1 - r} for s, r in steps
    ]
    rows = [row | {"peak_memory_mb": 900.0} for row in rows]
    records = [{"phase": "train", "metrics": row} for row in rows]
    records += [{"phase": "eval", "metrics": {"reward_mean": 1.0}}] * 2
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = {"train": {"seconds": seconds}, "evaluation_seconds": 6.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def cells(text: str) -> dict[str, list[str]]:
    rows = [line.split("  ") for line in text.splitlines()]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}


def test_the_first_step_counts_once_and_the_second_for_all_others(tmp_path):
    config = load(ROOT / "configs/magrpo_quickstart.yaml")
    config = replace(config, sections={"magrpo": replace(config.section, max_steps=11)})
    config = replace(config, sections={"magrpo": replace(config.section, eval_interval=4)})
    folder = written(tmp_path, (8.0, 0.5), (4.0, 0.25))
    rows = cells(describe_measured(config, config, folder, 384))
    assert rows["rollout"] == ["4 s", "1 s", "14 s"]  # 4 + 10 · 1
    assert rows["update"] == ["4 s", "3 s", "34 s"]
    assert rows["a training step"] == ["8 s", "4 s", "48 s"]
    assert rows["evaluations"] == ["3 s", "12 s"]  # before step 1, after the steps 4, 8 and 11
    assert rows["together"] == ["60 s"]


def test_preferences_are_multiplied_to_all_tasks(tmp_path):
    config = load(ROOT / "configs/madpo_quickstart.yaml")
    few = {"batch_size": 4, "num_train_epochs": 1, "num_iterations": 3, "round_tasks": 20}
    config = replace(config, sections={"madpo": replace(config.section, **few)})
    measured = replace(config.section, round_tasks=8, num_train_epochs=2, max_steps=2)
    measured = replace(config, sections={"madpo": measured})
    folder = written(tmp_path, (3.0, 0.5), (1.0, 0.5), seconds=12.0)
    rows = cells(describe_measured(config, measured, folder, 100))
    assert rows["a training step"][-1] == "17 s"  # 3 rounds of 5 steps: 3 + 14 · 1
    assert rows["preferences"] == ["8 s", "60 s"]  # 12 − 4 for 8 tasks, and 60 are labelled
    assert rows["together"] == ["86 s"]  # with three evaluations of 3 s


def test_a_run_without_a_step_gives_no_number(tmp_path):
    config = load(ROOT / "configs/magrpo_quickstart.yaml")
    with pytest.raises(UserError, match="--measure"):
        describe_measured(config, config, written(tmp_path), 384)


def test_durations():
    assert [duration(s) for s in (None, 0.25, 119, 120, 7199, 7200)] == [
        "unknown", "0.25 s", "119 s", "2 min", "120 min", "2 h",
    ]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["magrpo", "madpo", "marlhf"])
def test_a_measurement_trains_and_leaves_nothing(algorithm, zygote: Zygote, tmp_path: Path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = [*small_of(algorithm, tmp_path / "run"), "wandb.mode=offline"]
    arguments += ["--dry-run", "--measure"]
    run = zygote.finish(algorithm, arguments, TMPDIR=str(temporary))
    assert cells(run.output)["a training step"][1:], run.output
    assert not (tmp_path / "run").exists() and not list(temporary.glob("*/run"))


def test_every_processes_part_is_measured(zygote: Zygote, tmp_path: Path):
    arguments = [*small_of("magrpo", tmp_path / "run"), "--dry-run", "--measure"]
    team = zygote.finish_team(2, "magrpo", arguments)
    assert "a training step" in team[0].output and "a training step" not in team[1].output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_settings_are_ones_that_every_shipped_run_takes(path):
    measured, *_ = resolved(path, *overrides(load(path), Path("/x")))
    assert measured.online.max_steps == 2 and measured.wandb is None


@pytest.mark.parametrize("flags", [["--measure"], ["--dry-run", "--hardware", "h100"]])
def test_flags_that_say_what_to_give_instead(flags, capsys):
    config = str(ROOT / "configs/magrpo_quickstart.yaml")
    assert main("magrpo", lambda run: pytest.fail("built"), ["--config", config, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flags[-2 if 'h100' in flags else -1]}:")
    assert error.count("\n") == 1
