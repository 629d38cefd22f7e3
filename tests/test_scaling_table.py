"""The table of team sizes, from runs and evaluations that are there already."""

from __future__ import annotations

import json
import sys

from benchmarks import scaling_table


def test_cells_are_means_over_tasks_of_all_seeds(tmp_path, monkeypatch, capsys):
    def made(name: str, of_size: dict[int, list[float]]) -> None:
        run = tmp_path / name
        run.mkdir()
        (run / "summary.json").write_text("{}")
        for agents, shares in of_size.items():
            told = [{"task_id": str(i), "pass@1": share} for i, share in enumerate(shares)]
            (run / f"as_{agents}.json").write_text(json.dumps({"per_task": told}))

    for seed, third in ((1, 0.0), (2, 1.0)):
        made(f"SHPPO_2_{seed}", {1: [1, 0, third, 1], 2: [1, 1, 1, 1]})
        made(f"shared_MAPPO_1_{seed}", {1: [0, 0, 0, 0]})
        made(f"shared_MAPPO_2_{seed}", {1: [0.5, 0.5, 0.5, 0.5], 2: [1, 0, 0, 0]})
    arguments = ["--seeds", "1", "2", "--trained", "2", "--sizes", "1", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["scaling_table.py", *arguments])
    scaling_table.main()
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[2:4] for line in lines if "|" in line}
    told = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    # Means of tasks over the seeds 1, 0, 0.5, 1: mean 0.625; deviation √(0.6875 / 3) = 0.479, / √4.
    assert told["SHPPO, trained with 2"] == ["0.62 ± 0.24", "1.00 ± 0.00"]
    assert told["shared MAPPO, trained with 2"] == ["0.50 ± 0.00", "0.25 ± 0.25"]
    assert told["shared MAPPO, trained with each"] == ["0.00 ± 0.00", "0.25 ± 0.25"]
    assert (tmp_path / "scaling.png").stat().st_size > 5000
