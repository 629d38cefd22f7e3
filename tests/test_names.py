"""Packages beside ``comlrl`` have two names and are imported once, in a checkout and in a wheel."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

PACKAGES = ("rewards", "external", "loggers", "trainers")


@pytest.mark.parametrize("module", ["rewards.code.reward", "loggers.report.write", "external"])
def test_both_names_are_one_module(module):
    real = importlib.import_module(module)
    assert importlib.import_module(f"comlrl.{module}") is real
    assert real.__name__ == real.__spec__.name == module


def test_a_module_that_is_not_there_is_named_as_it_was_asked_for():
    with pytest.raises(ModuleNotFoundError, match=r"'comlrl\.rewards\.nothing'"):
        importlib.import_module("comlrl.rewards.nothing")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel of the checkout's Python files would install."""
    source = tmp_path_factory.mktemp("wheel")
    only_code = shutil.ignore_patterns("*.safetensors", "*.jsonl", "__pycache__", "configs")
    for package in ("comlrl", *PACKAGES):
        shutil.copytree(ROOT / package, source / package, ignore=only_code)
    for file in [*ROOT.glob("train_*.py"), ROOT / "setup.py", ROOT / "pyproject.toml"]:
        shutil.copy(file, source)
    for file in ("README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    (source / "trainers/launch/configs").mkdir()
    line = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "lib"]
    subprocess.run(line, cwd=source, check=True, capture_output=True)
    return source / "lib"


def _python(code: str, wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Without the editable installation of the checkout (``-S``), whose packages come first."""
    path = [".", str(wheel), *(place for place in sys.path if place.endswith("-packages"))]
    line = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path}\n{code}"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    return done


def test_a_wheel_has_one_name_at_the_top_level(wheel: Path):
    assert [path.name for path in wheel.iterdir()] == ["comlrl"]
    assert (wheel / "comlrl/train_magrpo.py").is_file()


def test_the_short_name_is_found_in_a_wheel_with_a_notice(wheel: Path, tmp_path: Path):
    code = "import comlrl.rewards.code.reward as long\nimport rewards.code.reward as short\n"
    code += "from rewards.code import prompt_templates\nassert long is short\n"
    code += "print(long.__name__, long.__spec__.name, prompt_templates.__name__, long.__file__)"
    done = _python(code, wheel, tmp_path)
    name = "comlrl.rewards.code.reward"
    file = wheel / "comlrl/rewards/code/reward.py"
    assert done.stdout.split() == [name, name, "comlrl.rewards.code.prompt_templates", str(file)]
    assert done.stderr.count("notice: `rewards` is `comlrl.rewards`") == 1


def test_a_users_module_comes_before_the_short_name(wheel: Path, tmp_path: Path):
    (tmp_path / "rewards.py").write_text("class Mine: pass")
    (tmp_path / "loggers").mkdir()
    (tmp_path / "loggers/__init__.py").write_text("")
    (tmp_path / "loggers/console.py").write_text("MINE = 1")
    code = "from comlrl.rewards.code.reward import CodeReward\nimport comlrl.loggers.console\n"
    code += "from rewards import Mine\nimport loggers.console\nprint(loggers.console.MINE)"
    done = _python(code, wheel, tmp_path)
    assert done.stdout == "1\n" and done.stderr == ""


def test_sources_have_the_grammar_of_the_oldest_python():
    for package in ("comlrl", *PACKAGES, "tools", "benchmarks", "tests"):
        files = list((ROOT / package).rglob("*.py"))
        assert files, package
        for file in files:
            text = file.read_text(encoding="utf-8")
            assert isinstance(ast.parse(text, str(file), feature_version=(3, 10)), ast.Module)
