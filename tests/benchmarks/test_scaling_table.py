"""The table of team sizes, from runs and evaluations that are there already."""

from __future__ import annotations

import json
import sys

from benchmarks import scaling_table


def test_cells_are_means_and_deviations_over_seeds(tmp_path, monkeypatch, capsys):
    def evaluated(path: str, passed: float) -> None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(json.dumps({"metrics": {"pass@1": passed}}))

    def trained(name: str, of_size: dict[str, float]) -> None:
        for size, passed in of_size.items():
            evaluated(f"{name}/as_{size}.json", passed)
        (tmp_path / name / "summary.json").write_text("{}")

    evaluated("untrained_1.json", 0.125)
    evaluated("untrained_2.json", 0.25)
    trained("SHPPO_2_1", {"1": 0.5, "2": 1.0})
    trained("SHPPO_2_2", {"1": 0.8, "2": 1.0})
    for seed in (1, 2):
        trained(f"shared_MAPPO_1_{seed}", {"1": 0.0})
        trained(f"shared_MAPPO_2_{seed}", {"1": 0.5, "2": 0.25 * seed})
    for key, passed in zip((101, 102, 103), (0.4, 0.5, 0.6), strict=True):
        evaluated(f"SHPPO_2_1/as_2_key_{key}.json", passed)

    arguments = ["--seeds", "1", "2", "--trained", "2", "--sizes", "1", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["scaling_table.py", *arguments])
    scaling_table.main()
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[2:4] for line in lines if "|" in line}
    row_of = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    assert row_of["untrained"] == ["0.12", "0.25"]
    # 0.5 and 0.8: mean 0.65, deviation 0.3 / √2 = 0.212; 0.25 and 0.5: 0.375, 0.25 / √2 = 0.177.
    assert row_of["SHPPO, trained with 2"] == ["0.65 ± 0.21", "1.00 ± 0.00"]
    assert row_of["shared MAPPO, trained with 2"] == ["0.50 ± 0.00", "0.38 ± 0.18"]
    assert row_of["shared MAPPO, trained with each"] == ["0.00 ± 0.00", "0.38 ± 0.18"]
    # Three keys 0.4, 0.5, 0.6: s = 0.1; of two seeds each: 2 · 0.1 · √(2 / 2) = 0.2.
    assert "s = 0.100; noise floor of a difference of two cells: 0.200." in lines[-1]
    assert (tmp_path / "scaling.png").stat().st_size > 5000
