"""A logger whose package is missing is refused before anything heavy loads."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from comlrl.trainers.launch.commands import train

QUICKSTART = "configs/magrpo_quickstart.yaml"


@pytest.mark.parametrize("override", ["trackio={}", "trackio.project=x"])
def test_a_missing_package_is_one_line(override, monkeypatch, capsys, tmp_path):
    name, find = override.partition("=")[0].partition(".")[0], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "trackio" else find(n, *a)
    )
    heavy = "trackio" in sys.modules

    def never(*_):
        raise AssertionError("built")

    arguments = ["--config", QUICKSTART, "--override", override, f"output.dir={tmp_path / 'run'}"]
    for more in ([], ["--dry-run"]):
        assert train.main("magrpo", never, [*arguments, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"error: {name}: {name} is not installed; pip install {name}"
    assert ("trackio" in sys.modules) == heavy
    assert not (tmp_path / "run").exists()


def test_processes_without_a_task_get_a_notice(monkeypatch, capsys):
    arguments = ["--config", QUICKSTART, "--dry-run", "--override", "magrpo.batch_size=2"]
    for processes, expected in (("2", 0), ("3", 1)):
        monkeypatch.setenv("WORLD_SIZE", processes)
        assert train.main("magrpo", lambda run: pytest.fail("built"), arguments) == 0
        lines = [x for x in capsys.readouterr().err.splitlines() if "magrpo.batch_size" in x]
        assert len(lines) == expected
