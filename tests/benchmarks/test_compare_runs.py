"""The tables of runs beside each other, from evaluations that are there already."""

from __future__ import annotations

import json
import sys

from benchmarks import compare_runs


def test_noise_and_cost_by_hand(tmp_path, monkeypatch, capsys):
    def made(name: str, rewards: list[float], flops: float) -> None:
        for key, reward in enumerate(rewards, 1):
            metrics = {"reward_mean": reward, "pass@1": 0.5, "pass@2": 0.75}
            budget = {"flops_per_answer": flops, "tokens_per_answer": 40}
            result = {"samples": 2, "metrics": metrics, "budget": budget}
            (tmp_path / f"{name}_{key}_2.json").write_text(json.dumps(result))

    made("runs_team", [3.0, 3.2], 2e9)
    made("single", [2.9, 2.9], 1.5e9)
    made("discussion", [1.0, 1.0], 0.5e9)
    what = ["runs/team", "baseline:single", "baseline:discussion"]
    options = ["--keys", "1", "2", "--samples", "2", "--out", str(tmp_path)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *what, *options])
    compare_runs.main()
    output = capsys.readouterr().out
    # Variances 0.02, 0 and 0: s = √(0.02 / 3) = 0.082, and the floor 2 s √(2 / 2) = 0.163.
    assert "s = 0.082;" in output and output.split("2 keys: ")[1].startswith("0.163")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
    cells = {row[0]: row[1:] for row in rows if row}
    # The team costs 2e9: a single agent has two answers for it (1.33 rounded up), the third four.
    assert cells["runs/team"] == ["3.00, 3.20", "3.10", "0.50", "0.50 (k = 1)", "40", "2000M"]
    assert cells["baseline:single"][3] == "0.75 (k = 2)"
    assert cells["baseline:discussion"][3] == "k = 4"  # more than were sampled
    assert cells["baseline:single − runs/team"] == ["-0.200", "yes"]
    assert cells["baseline:discussion − baseline:single"] == ["-1.900", "yes"]


def test_answers_that_cost_nearly_as_much_count_as_equal():
    budget = {"flops_per_answer": 1.92e9, "tokens_per_answer": 40}
    metrics = {"reward_mean": 1.0, "pass@1": 0.5, "pass@2": 0.75}
    run = {"samples": 2, "metrics": metrics, "budget": budget}
    assert "0.50 (k = 1)" in compare_runs.row("team", [run], 2e9)
    assert "0.75 (k = 2)" in compare_runs.row("team", [run], 2.1e9)
