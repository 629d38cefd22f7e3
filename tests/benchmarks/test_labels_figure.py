"""The figure of labels: what stands on its axis."""

from __future__ import annotations

import json

from benchmarks.labels_figure import curve, draw


def test_labels_are_counted_where_they_are_logged_and_else_are_environment_steps(tmp_path):
    def line(step: int, phase: str, **metrics: float) -> str:
        return json.dumps({"step": step, "phase": phase, "metrics": metrics}) + "\n"

    scored, judged = tmp_path / "magrpo", tmp_path / "marlhf"
    for folder in (scored, judged):
        folder.mkdir()
    (scored / "metrics.jsonl").write_text(
        line(0, "eval", reward_mean=1.0) + line(8, "train") + line(8, "eval", reward_mean=2.0)
    )
    # Of 12 environment steps; a reward model has scored the others.
    labelled = {"preferences/labelled": 4.0}
    (judged / "metrics.jsonl").write_text(
        line(4, "train", **labelled) + line(12, "train") + line(12, "eval", reward_mean=3.0)
    )
    assert curve(scored, "reward_mean") == [(0, 1.0), (8, 2.0)]
    assert curve(judged, "reward_mean") == [(4.0, 3.0)]
    assert curve(judged, "convention_match_rate") == []
    draw({"magrpo": [scored, scored], "marlhf": [judged]}, tmp_path / "labels")
    assert (tmp_path / "labels.png").stat().st_size > 5000 and (tmp_path / "labels.svg").exists()
