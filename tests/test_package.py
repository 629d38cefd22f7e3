"""The wheel, in its own environment and outside of the checkout.

On the Python that runs the tests; ``make test-wheel`` takes every supported one that is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.runs import ROOT

THIS = "{}.{}".format(*sys.version_info)
PYTHONS = os.environ.get("WHEEL_PYTHONS", THIS).split()
SMALL = ["magrpo.batch_size=1", "magrpo.num_generations=2", "magrpo.max_new_tokens=4"]
SMALL += ["magrpo.eval_num_samples=1"]
TRAIN = ["train", "magrpo", "--config", "magrpo_quickstart", "--override", *SMALL]
TRAIN += ["magrpo.max_steps=2", "output.dir=run"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # most of it is pip
]


def _run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _interpreter(version: str) -> str:
    """The Python of a version such as 3.12; skips where there is none."""
    if version == THIS:
        return sys.executable
    found = shutil.which(f"python{version}")
    works = found and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True)
    if not found or not works or works.returncode:  # a pyenv shim of another version fails
        pytest.skip(f"needs python{version} on the path")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".git", ".venv*", "outputs", "build", "*.egg-info", "wandb")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder]
    _run(*pip, folder / "source", cwd=folder)
    shutil.rmtree(folder / "source")
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module", params=PYTHONS)
def bin(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The commands of a fresh environment, pinned and without extras; deleted afterwards."""
    python = _interpreter(request.param)
    folder = tmp_path_factory.mktemp("package")
    _run(python, "-m", "venv", folder / "env", cwd=folder)
    _install(folder / "env/bin", str(wheel))
    yield folder / "env/bin"
    shutil.rmtree(folder / "env")


def _install(bin: Path, wanted: str) -> None:
    pip = [bin / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    _run(*pip, wanted, cwd=bin)


def test_the_wheel_trains_evaluates_sweeps_and_exports(bin: Path, tmp_path: Path):
    comlrl = bin / "comlrl"
    for command in ("train", "evaluate", "report", "export", "sweep", "arena"):
        assert command in _run(comlrl, "--help", cwd=tmp_path).stdout
    assert "parameters" in _run(comlrl, *TRAIN, "--dry-run", cwd=tmp_path).stdout
    assert not list(tmp_path.iterdir())
    _run(comlrl, *TRAIN, "magrpo.eval_interval=2", cwd=tmp_path)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["updates"] == 2 and (tmp_path / "run/report.html").is_file()
    _run(comlrl, "evaluate", "--checkpoint", "run", "--override", *SMALL, cwd=tmp_path)
    assert len(list((tmp_path / "run").glob("evaluation_final_model_*.json"))) == 1
    sweep = ["magrpo_learning_rate_generations", "--count", "1", "--override", *SMALL]
    _run(comlrl, "sweep", *sweep, "magrpo.max_steps=1", cwd=tmp_path)
    assert "done" in (next(tmp_path.glob("outputs/sweeps/*")) / "results.csv").read_text()
    _run(comlrl, "report", "run", cwd=tmp_path)
    _run(comlrl, "export", "run", "--merge", cwd=tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/exported_model/agent_1")


MINE = """
from comlrl.rewards.code.reward import CodeReward
from comlrl.types import Reward, Score

class Short(Reward):
    def score(self, actions):
        return [Score(-float(sum(map(len, action.completions_N)))) for action in actions]
"""


def test_a_users_module_imports_the_packages(bin: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    shutil.copy(ROOT / "configs/magrpo_quickstart.yaml", tmp_path / "mine.yaml")
    train = ["mine.yaml" if word == "magrpo_quickstart" else word for word in TRAIN]
    _run(bin / "comlrl", *train, "reward.target=mine:Short", cwd=tmp_path)


LOGGED = """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("team")
rows = [row for row in SQLiteStorage.get_logs("team", name) if "train/reward_mean" in row]
print(len(rows))
"""


def test_trackio_installs_beside_the_pins_and_logs(
    bin: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _install(bin, f"{wheel}[trackio]")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    _run(bin / "comlrl", *TRAIN, "trackio.project=team", cwd=tmp_path)
    done = _run(bin / "python", "-c", LOGGED, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "2"
