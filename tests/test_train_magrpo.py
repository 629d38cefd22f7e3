"""The main job as a user starts it: it learns, it leaves its run directory, it repeats itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.builtin import TINY_CODER

ROOT = Path(__file__).resolve().parent.parent
CLOCK = ("time", "second", "memory")  # in names of values that depend on the clock or the machine
STEPS = 6
SETTINGS = [
    "dataset.train_split=train[:12]", "magrpo.batch_size=12", "magrpo.num_generations=8",
    "magrpo.learning_rate=5e-3", f"magrpo.eval_interval={STEPS}", "magrpo.eval_num_samples=4",
    "magrpo.lr_scheduler=constant", "output.verbose=true",
]  # fmt: skip


def train(folder: Path, *overrides: str) -> Path:
    done = subprocess.run(
        [
            sys.executable, "train_magrpo.py", "--config", "configs/magrpo_quickstart.yaml",
            "--override", *SETTINGS, f"output.dir={folder}", *overrides,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{folder}/report.html" in done.stdout
    return folder


def records(folder: Path, phase: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["phase"] == phase]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("magrpo") / "run", f"magrpo.max_steps={STEPS}")


def test_a_few_steps_raise_the_reward_beyond_luck(run):
    rewards = [record["metrics"]["reward_mean"] for record in records(run, "train")]
    assert len(rewards) == STEPS
    # Each step samples the same 12 tasks 8 times. A reward lies in [0, 4] and spreads by less
    # than 1.5, so that the mean of two steps' 192 joint actions has a standard error under
    # 1.5 / √192 = 0.11, and a difference of two such means one under 0.16. Three of them are
    # less than 0.5: a team that does not learn comes there once in a thousand runs.
    assert sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2 > 0.5


def test_the_run_directory_is_complete(run):
    expected = {"config.yaml", "metrics.jsonl", "summary.json", "report.html", "final_model",
                "curves.png", "episodes.jsonl"}  # fmt: skip
    assert expected <= {path.name for path in run.iterdir()}
    for record in records(run, "train") + records(run, "eval"):
        assert set(record) == {"step", "update", "epoch", "phase", "metrics"}
        assert all(math.isfinite(value) for value in record["metrics"].values())
    for file in run.rglob("*"):
        assert file.suffix not in (".bin", ".pt", ".pkl"), file


def test_environment_steps_are_scored_joint_actions(run):
    # 12 tasks · 8 aligned joint actions of one turn: 96 a step.
    assert [r["step"] for r in records(run, "train")] == [96 * (i + 1) for i in range(STEPS)]
    assert [r["update"] for r in records(run, "train")] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records(run, "eval")] == [0, 96 * STEPS]  # before and after
    assert [r["epoch"] for r in records(run, "train")] == list(range(STEPS))  # one step an epoch


def test_the_summary_agrees_with_the_metrics(run):
    summary = json.loads((run / "summary.json").read_text())
    before, after = (record["metrics"] for record in records(run, "eval"))
    assert summary["algorithm"] == "magrpo"
    assert summary["env_steps"] == summary["scored_joint_actions"] == 96 * STEPS
    assert summary["updates"] == STEPS
    for name in ("reward_mean", "turn_1/reward_mean", "pass@1"):
        assert summary["eval_start"][name] == pytest.approx(before[name])
        assert summary["eval_end"][name] == pytest.approx(after[name])
    train = summary["train"]
    assert train["joint_actions_per_second"] == pytest.approx(96 * STEPS / train["seconds"])
    assert summary["wall_seconds"] > train["seconds"] > 0
    assert train["tokens_per_second"] > 0 and train["peak_memory_mb"] > 0
    assert summary["distributed"] == {"world_size": 1, "weights_in_sync": True}


def test_final_adapters_load_with_peft(run):
    for index in range(2):
        folder = run / "final_model" / f"agent_{index}"
        base = AutoModelForCausalLM.from_pretrained(TINY_CODER)
        model = PeftModel.from_pretrained(base, str(folder))
        lora_b = [p for name, p in model.named_parameters() if "lora_B" in name]
        assert lora_b and max(float(p.detach().abs().max()) for p in lora_b) > 0  # it was trained
        assert AutoTokenizer.from_pretrained(folder).eos_token is not None


def test_the_report_needs_no_network(run):
    page = (run / "report.html").read_text()
    for outside in ('src="http', 'href="http', "@import", "url(http"):
        assert outside not in page


@pytest.mark.slow
def test_the_written_configuration_repeats_the_run(run, tmp_path):
    """And so: the same seed gives the same numbers, the clock's aside."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["magrpo"]["max_steps"] == STEPS and config["seed"] == 42
    again = tmp_path / "again"
    done = subprocess.run(
        [
            sys.executable, "train_magrpo.py", "--config", str(run / "config.yaml"), "--override",
            f"output.dir={again}", "magrpo.max_steps=2", "output.save_final_model=false",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (again / "final_model").exists()

    def episodes(folder: Path) -> list[dict]:
        steady = []
        for record in records(folder, "eval")[:1] + records(folder, "train")[:2]:
            metrics = {
                name: value
                for name, value in record["metrics"].items()
                if not any(word in name for word in (*CLOCK, "progress"))
            }
            steady.append(record | {"metrics": metrics})
        return steady

    assert episodes(again) == episodes(run)
