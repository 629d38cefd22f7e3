"""The notebook of docs/, run as it stands: its cells one after the other, in one Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import python

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = json.loads((ROOT / "docs/two_minutes.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def program() -> str:
    return "\n\n".join("".join(cell["source"]) for cell in CODE)


def run(code: str, folder: Path) -> str:
    return python("-c", code, cwd=folder, MPLBACKEND="Agg").stdout


@pytest.mark.slow
def test_the_team_learns_and_an_episode_is_shown(tmp_path: Path) -> None:
    output = run(program(), tmp_path)
    lines = (tmp_path / "outputs/two_minutes/metrics.jsonl").read_text().splitlines()
    rewards = [
        record["metrics"]["reward_mean"]
        for record in map(json.loads, lines)
        if record["phase"] == "eval"
    ]
    assert len(rewards) == 5 and rewards[-1] > rewards[0] + 1
    assert "before training: reward" in output and "── main\n" in output
