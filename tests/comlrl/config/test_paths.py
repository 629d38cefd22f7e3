"""Paths of a configuration: beside the YAML file first, then in the working directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from comlrl.builtin import TINY_CODER
from comlrl.config.paths import absolute, searched
from comlrl.trainers.launch.commands.train import main
from tests.support.runs import resolved


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The YAML file's, and the working directory."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    return beside, here


def test_the_first_folder_that_has_it(folders):
    beside, here = folders
    (here / "a.jsonl").touch()
    assert absolute("a.jsonl", folders) == str(here / "a.jsonl")
    (beside / "a.jsonl").touch()
    assert absolute("a.jsonl", folders) == str(beside / "a.jsonl")
    assert absolute("a.jsonl", folders[::-1]) == str(here / "a.jsonl")
    assert absolute("../here/a.jsonl", folders) == str(here / "a.jsonl")
    assert absolute(["a.jsonl", "Qwen/Qwen3"], folders) == [str(beside / "a.jsonl"), "Qwen/Qwen3"]
    for other in ("builtin:coopmini", "nowhere.jsonl", "", None, 3):
        assert absolute(other, folders) == other


def test_a_file_of_the_yaml_is_found_from_anywhere_and_again_from_the_run(folders):
    beside, here = folders
    (beside / "rows.jsonl").touch()
    (beside / "run").mkdir()
    os.symlink(TINY_CODER, beside / "coder")
    file = beside / "c.yaml"
    file.write_text(
        "dataset: {name: rows.jsonl}\nagents: [coder, coder]\ninit_from: run\nmagrpo: {}\n"
    )
    found, *_ = resolved(file)
    assert found.dataset.name == str(beside / "rows.jsonl")
    assert found.agents == (str(beside / "coder"),) * 2 and found.init_from == str(beside / "run")
    assert found.to_dict()["dataset"]["name"] == str(beside / "rows.jsonl")
    (here / "rows.jsonl").touch()  # of the command line: where the shell is, first
    assert resolved(file)[0].dataset.name == str(beside / "rows.jsonl")
    from_shell, *_ = resolved(file, "dataset.name=rows.jsonl")
    assert from_shell.dataset.name == str(here / "rows.jsonl")


@pytest.mark.parametrize(
    "item", ["dataset.name=nowhere.jsonl", "agent_model.name=./nowhere", "init_from=no/where"]
)
def test_what_is_not_there_is_named_with_the_folders_searched(folders, item, capsys):
    beside, here = folders
    file = beside / "c.yaml"
    file.write_text("magrpo: {}\n")
    assert main("magrpo", None, ["--config", str(file), "--override", item, "--dry-run"]) == 2
    line = capsys.readouterr().err
    key, _, name = item.partition("=")
    assert line.startswith(f"error: {key}: '{name}' does not exist: looked in {beside}, beside the")
    assert str(here) in line and line.count("\n") == 1


def test_searched_names_one_folder_once(folders):
    assert searched(folders[1]) == f"looked in {folders[1]}"
