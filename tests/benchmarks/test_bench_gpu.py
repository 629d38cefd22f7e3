"""The benchmark for GPUs, on a CPU with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu

ROOT = Path(__file__).parents[2]


def bench(out: Path, *options: str) -> tuple[int, list[dict]]:
    """Return the exit code and the results."""
    command = [sys.executable, str(ROOT / "benchmarks/bench_gpu.py"), "--out", str(out)]
    code = subprocess.run([*command, "--device", "cpu", "--tiny", *options], cwd=out.parent)
    lines = (out / "results.jsonl").read_text().splitlines()
    return code.returncode, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_phase_gives_numbers(tmp_path: Path):
    code, results = bench(tmp_path / "out")
    phases = {"machine", "decoding", "update", "steps", "peer"}  # "tests" need a GPU
    assert code == 0 and {line["phase"] for line in results} == phases
    assert all(line["value"] > 0 for line in results)
    table = (tmp_path / "out/table.md").read_text()
    assert all(f"| {line['phase']} | {line['what']} |" in table for line in results)


def test_a_phase_without_results_leaves_a_table(tmp_path, monkeypatch):
    """Such as the first one on a machine without pytest."""
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--out", str(tmp_path)])
    assert bench_gpu.main() == 0 and (tmp_path / "table.md").exists()


def test_failing_tests_fail_their_phase(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "1 failed, 2 passed in 3.00s\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    results = bench_gpu.tests("cuda", False)
    assert [next(results)["value"] for _ in range(2)] == [2, 1]
    with pytest.raises(SystemExit, match="1"):
        next(results)


def test_a_step_of_the_peers_loop_updates_each_agent_once(monkeypatch):
    steps = []
    update = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(1) or update(self))
    monkeypatch.setattr(bench_gpu, "seconds", lambda work, *_: work() or 1.0)
    assert len(list(bench_gpu.peer("cpu", True))) == 1
    assert len(steps) == 2


@pytest.mark.slow
def test_a_phase_beyond_the_time_limit_is_recorded_as_that(tmp_path: Path):
    code, results = bench(tmp_path / "out", "--seconds", "0")
    assert code == 1 and len(results) == 5
    assert not any("value" in line for line in results)
