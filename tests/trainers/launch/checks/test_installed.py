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
        assert line == f"error: {name}: {name} is not installed; pip install 'comlrl[{name}]'"
    assert ("trackio" in sys.modules) == heavy
    assert not (tmp_path / "run").exists()
