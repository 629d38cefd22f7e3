"""What a run that was refused, or ended before its first step, leaves: nothing."""

from __future__ import annotations

import json
from pathlib import Path

from comlrl.loop.traces import FolderSnapshot
from tests.support.runs import Zygote, small


def test_only_what_the_run_wrote_is_removed(tmp_path):
    folder = tmp_path / "outputs" / "run"
    before = FolderSnapshot.from_folder(folder)
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").touch()
    before.restore()
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("the user's")
    before = FolderSnapshot.from_folder(folder)
    (folder / "config.yaml").touch()
    before.restore()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_training_step_or_a_result_is_left(tmp_path):
    line = {"step": 0, "update": 0, "epoch": 1, "phase": "eval", "metrics": {}}
    for name, text, left in [
        ("metrics.jsonl", json.dumps(line), False),
        ("metrics.jsonl", json.dumps(line | {"phase": "train"}), True),
        ("summary.json", "{}", True),
        ("non_finite_batch.safetensors", "", True),
    ]:
        folder = tmp_path / "run"
        before = FolderSnapshot.from_folder(folder)
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text + "\n")
        before.restore()
        assert folder.exists() == left, name
        for path in folder.glob("*"):
            path.unlink()
        if left:
            folder.rmdir()


def test_refused_and_crashed_runs_leave_the_name_to_the_next(zygote: Zygote, tmp_path: Path):
    own = tmp_path / "mine.py"
    own.write_text("class R:\n    def score(self, actions):\n        return [1 / 0]\n")
    file = tmp_path / "c.yaml"
    file.write_text("reward: {target: 'mine:R'}\nmagrpo: {}\n")
    base = [w for w in small("magrpo", tmp_path, max_steps=1) if not w.startswith("output.dir")]
    base = [*base, f"output.base_dir={tmp_path / 'outputs'}"]
    (tmp_path / "empty.jsonl").touch()
    empty = f"dataset.name={tmp_path / 'empty.jsonl'}"
    assert "contains no rows" in zygote.finish("magrpo", [*base, empty], code=2).error
    assert not (tmp_path / "outputs").exists()
    crashed = zygote.finish("magrpo", ["--config", str(file), *base[2:]], code=1)
    assert "ZeroDivisionError" in crashed.output
    assert not (tmp_path / "outputs").exists()
    zygote.finish("magrpo", base)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["magrpo_coopmini_42"]
