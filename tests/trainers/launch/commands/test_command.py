"""The ``comlrl`` command and what it finds by name: as far as it goes without loading anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comlrl.config.algorithms import SECTIONS
from comlrl.errors import UserError
from comlrl.trainers.launch.__main__ import COMMANDS, main
from comlrl.trainers.launch.checks.shipped import CONFIGS, config_file
from comlrl.trainers.launch.commands.search import read_sweep
from tests.support.processes import python

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outside of the checkout, where ``configs/`` and the scripts are not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["comlrl"])
    return tmp_path


def test_every_script_of_the_repository_is_a_command():
    scripts = {f.stem.replace("train_", "train ") for f in ROOT.glob("*.py")}
    assert scripts == {*COMMANDS, *(f"train {name}" for name in SECTIONS)} - {"report", "export"}


@pytest.mark.parametrize("words", [[], ["--help"], ["train"], ["train", "-h"]])
def test_usage(words, capsys):
    assert main(words) == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: comlrl COMMAND") and "magrpo" in output and "export" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "magrpoo"], "there is no `comlrl train magrpoo`; did you mean"),
        (["evalaute"], "did you mean `evaluate`"),
        (["xyz"], "see comlrl --help"),
        (["train", "magrpo"], "required: --config"),
        (["train", "magrpo", "--config", "magrpo_quikstart"], "did you mean `magrpo_quickstart`?"),
        (["train", "magrpo", "--config", "other/magrpo_quickstart.yaml"], "does not exist"),
        (["train", "grpo", "--config", "magrpo_quickstart"], "use train_magrpo.py"),
        (["evaluate", "--config", "nothing_like_it"], "is neither a file nor a shipped conf"),
        (["sweep", "madpo_beta"], "sweep file: 'madpo_beta' is neither a file nor"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "ppo", "--help"])
    output = capsys.readouterr().out
    assert output.startswith("usage: comlrl train ppo ") and "left out: ppo_he_config" in output


def test_a_shipped_configuration_has_three_spellings_and_gives_way_to_a_file(elsewhere):
    names = ("ppo_quickstart", "ppo_quickstart.yaml", "configs/ppo_quickstart.yaml")
    assert {config_file(name) for name in names} == {ROOT / "configs" / "ppo_quickstart.yaml"}
    (elsewhere / "configs").mkdir()
    (elsewhere / names[2]).write_text("ppo: {}\n")
    assert config_file(names[2]) == Path(names[2])
    assert config_file(names[0]) == CONFIGS / "ppo_quickstart.yaml"
    assert config_file("/nowhere/ppo_quickstart.yaml") == Path("/nowhere/ppo_quickstart.yaml")
    with pytest.raises(UserError, match="name a YAML file"):
        config_file("zzz")


def test_a_shipped_sweep_runs_without_the_scripts():
    for name in ("shppo_lambdas", "configs/sweeps/shppo_lambdas.yaml"):
        sweep = read_sweep(name)
        line = sweep.command_line({"shppo.lambda_e": 0.1})
        assert line[:6] == [
            sys.executable, "-m", "comlrl.trainers.launch", "train", "shppo", "--config",
        ]  # fmt: skip
        assert config_file(line[6]) == ROOT / "configs" / "shppo_quickstart.yaml"


def test_a_dry_run_elsewhere():
    """What a sweep starts, in its own process."""
    train = ["-m", "comlrl.trainers.launch", "train", "shppo"]
    done = python(*train, "--config", "configs/shppo_quickstart.yaml", "--dry-run")
    assert "joint actions" in done.stdout
