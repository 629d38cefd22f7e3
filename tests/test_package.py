"""The wheel, in its own environment and outside of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.runs import ROOT

SMALL = ["magrpo.batch_size=1", "magrpo.num_generations=2", "magrpo.max_new_tokens=4"]
SMALL += ["magrpo.eval_num_samples=1"]


def _run(*words: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``comlrl`` command of a fresh environment, pinned and without extras."""
    folder = tmp_path_factory.mktemp("package")
    left_out = shutil.ignore_patterns(".git", ".venv*", "outputs", "build", "*.egg-info", "wandb")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=left_out)
    pip = [folder / "env/bin/python", "-m", "pip"]
    _run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    _run(*pip, "wheel", "-q", "--no-deps", "-w", folder, folder / "source", cwd=folder)
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("*.whl")
    _run(*pip, "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return folder / "env/bin/comlrl"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # most of it is pip
def test_the_wheel_trains_evaluates_sweeps_and_exports(installed: Path, tmp_path: Path):
    words = ["--config", "magrpo_quickstart", "--override", "output.dir=run", "magrpo.max_steps=3"]
    _run(installed, "train", "magrpo", *words, *SMALL, cwd=tmp_path)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["updates"] == 3 and (tmp_path / "run/report.html").is_file()
    _run(installed, "evaluate", "--checkpoint", "run", "--override", *SMALL, cwd=tmp_path)
    assert len(list((tmp_path / "run").glob("evaluation_final_model_*.json"))) == 1
    sweep = ["magrpo_learning_rate_generations", "--count", "1", "--override", *SMALL]
    _run(installed, "sweep", *sweep, "magrpo.max_steps=1", cwd=tmp_path)
    assert "done" in (next(tmp_path.glob("outputs/sweeps/*")) / "results.csv").read_text()
    _run(installed, "report", "run", cwd=tmp_path)
    _run(installed, "export", "run", "--merge", cwd=tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/exported_model/agent_1")
