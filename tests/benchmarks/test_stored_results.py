"""Results of other settings are not printed as the results of a call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare_runs, compare_settings, prompts_table, results_table
from comlrl.errors import UserError


class Begun(Exception):
    """A result is computed anew."""


def begin(*_: object, **__: object) -> None:
    raise Begun


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Call a program on one folder; return whether it begins, or its error."""
    monkeypatch.setattr(subprocess, "run", begin)
    monkeypatch.setattr(prompts_table, "sample", begin)

    def called(program, *arguments: str) -> str:
        argv = [*arguments, "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["program", *argv])
        try:
            program.main()
        except Begun:
            return "begun"
        except SystemExit as end:
            assert end.code == 2
        return capsys.readouterr().err

    return called


@pytest.mark.parametrize(
    ("program", "same", "other"),
    [
        (prompts_table, "--wordings plain", "--model other"),
        (prompts_table, "--tokens 128", "--tokens 64"),
        (compare_runs, "baseline:single --keys 1 2", "baseline:single --config grpo_quickstart"),
        (compare_settings, "turn_order --seeds 2", "turn_order --env-steps 10"),
        (compare_settings, "turn_order --every 5", "turn_order --answers 2"),
        (results_table, "--seeds 7 --only ppo", "--answers 4"),
        (results_table, "--jobs 1", "--override a.b=1"),
    ],
)
def test_a_folder_of_other_settings_is_refused(call, tmp_path, program, same, other):
    assert call(program, *same.split()) == "begun"
    assert call(program, *same.split()) == "begun"
    message = f"error: {tmp_path} holds results of other settings; choose another --out\n"
    assert call(program, *other.split()) == message


def test_comparisons_have_separate_folders(monkeypatch, tmp_path):
    """The commands of the pages have the default folder and different settings."""
    monkeypatch.setattr(compare_settings, "ROOT", tmp_path)
    monkeypatch.setattr(compare_settings, "train", begin)
    for arguments in (["roles", "--answers", "4"], ["turn_order", "--answers", "2"]):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(Begun):
            compare_settings.main()


def test_an_unfinished_run_is_trained_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: None if not folder.exists() else begin()
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    assert compare_settings.trained("magrpo_quickstart", folder, 1, 10, {}) == folder


def test_prompts_of_a_missing_model_are_one_line(monkeypatch, tmp_path, capsys):
    def refused(*_: object) -> None:
        raise UserError("agent_model.name='none': no such model")

    monkeypatch.setattr(prompts_table, "sample", refused)
    assert prompts_table.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: agent_model.name='none': no such model\n"


def test_prompts_name_the_page_of_wordings():
    page = (Path(__file__).parents[2] / "docs/cookbook.md").read_text()
    assert "docs/cookbook.md" in (prompts_table.__doc__ or "") and "prompts_table.py" in page
