"""The table of LoRA's ranks, from runs that are there already."""

from __future__ import annotations

import json
import sys

from benchmarks import lora_table


def test_the_best_rate_of_the_first_seed_is_that_of_the_others(tmp_path, monkeypatch, capsys):
    def made(name: str, end: float, seconds: float, memory: float) -> None:
        run = tmp_path / name
        run.mkdir()
        summary = {
            "env_steps": 2944, "train": {"peak_memory_mb": memory},
            "eval_start": {"reward_mean": 1.25}, "eval_end": {"reward_mean": end},
        }  # fmt: skip
        (run / "summary.json").write_text(json.dumps(summary))
        (run / "seconds").write_text(str(seconds))

    made("r4_0.001_1", 2.0, 90, 500)
    made("r4_0.003_1", 3.0, 100, 600)
    made("r4_0.01_1", 2.5, 95, 500)
    made("r4_0.003_2", 2.0, 120, 700)  # other rates are not asked for
    arguments = ["--seeds", "1", "2", "--only", "r4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lora_table.py", *arguments])
    lora_table.main()
    row = capsys.readouterr().out.splitlines()[2]
    # Mean 2.5 of 3 and 2, deviation √0.5; 110 s on average, 700 MB at most.
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "LoRA, r = 4", "0.001: 2.00, 0.003: 3.00, 0.01: 2.50", "0.003",
        "1.25 → 3.00, 1.25 → 2.00", "2.50 ± 0.71", "110 s", "700 MB",
    ]  # fmt: skip
