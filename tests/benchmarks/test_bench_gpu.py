"""The benchmark for GPUs, on a CPU with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_a_phase_beyond_the_time_limit_is_recorded_as_that(tmp_path: Path):
    code, results = bench(tmp_path / "out", "--seconds", "0")
    assert code == 1 and len(results) == 5
    assert not any("value" in line for line in results)
