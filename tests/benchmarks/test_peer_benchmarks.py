"""What the benchmarks against CoMLRL 1.4.3 rest on: its environment, device, reward and job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import bench_memory, bench_real_model, bench_train_step
from benchmarks.peer_on_config import job_of
from benchmarks.plain_reward import reward
from comlrl.builtin import TINY_CODER


def test_an_interrupted_installation_of_the_peer_continues(tmp_path, monkeypatch):
    calls: list[str] = []

    def run(command: list[str], check: bool) -> None:
        calls.append("venv" if "venv" in command else "pip")
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin/python").touch()
        if calls == ["venv", "pip"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench_train_step, "PEER", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        bench_train_step.make_peer()
    bench_train_step.make_peer()
    bench_train_step.make_peer()
    assert calls == ["venv", "pip", "venv", "pip"]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (bench_memory, []),
        (bench_train_step, []),
        (bench_real_model, ["--model", str(TINY_CODER), "--only", "steps"]),
    ],
)
def test_on_the_cpu_no_process_sees_a_gpu(program, arguments, monkeypatch):
    class Begun(Exception): ...

    def begin() -> None:
        raise Begun

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(program, "make_peer", begin)
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(Begun):
        program.main()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_parts_of_a_step_are_measured_on_steps(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(
        bench_real_model, "parts", lambda folder, steps: asked.append(steps) or [["1"] * 5]
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--model", str(TINY_CODER), "--only", "parts", "--steps", "7"]
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    bench_real_model.main()
    assert asked == [7]


def test_the_plain_reward_ends_a_program_that_does_not():
    item = {"entry_point": "f", "test": "def check(f):\n    assert f(1) == 1\n"}
    endless = "def f(x):\n    return x\nwhile True: pass\n"
    began = time.monotonic()
    assert reward(["", endless], item, timeout=0.1) == pytest.approx(0.6 + 0.5)
    assert reward(["", "def f(x):\n    return x\n"], item) == pytest.approx(0.6 + 0.5 + 1)
    assert time.monotonic() - began < 60


def test_the_peer_samples_as_the_configuration_says():
    file = str(Path(__file__).parents[2] / "configs/magrpo_quickstart.yaml")
    assert job_of(file, ["magrpo.top_p=0.9"])["top_p"] == 0.9
    assert job_of(file, ["magrpo.top_p=null"])["top_p"] == 1.0
