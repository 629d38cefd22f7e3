"""Checkpoints on a real disk: whole or not there at all."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from comlrl.errors import UserError
from comlrl.loop import checkpoint
from comlrl.loop.checkpoint import CheckpointError
from comlrl.loop.steps import Counters

TENSORS = {
    "agent_0": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])},
    "optimizer_0": {"updates": torch.tensor(7), "0.exp_avg": torch.randn(4).bfloat16()},
}


def save(run_dir: Path, step: int, limit: int | None = None) -> Path:
    return checkpoint.save(run_dir, step, {"loop": {"steps": step}}, TENSORS, limit)


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert path == tmp_path / "checkpoints/step_000003" == checkpoint.newest(tmp_path)
    found = checkpoint.read(path)
    assert found.state == {"loop": {"steps": 3}}
    assert found.tensors.keys() == TENSORS.keys()
    for name, component in TENSORS.items():
        for key, tensor in component.items():
            again = found.tensors[name][key]
            assert again.dtype == tensor.dtype and torch.equal(again, tensor)


def test_views_and_transposed_tensors_are_saved_by_value(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    path = checkpoint.save(tmp_path, 1, {}, {"x": {"t": whole.T, "row": whole[1]}})
    again = checkpoint.read(path).tensors["x"]
    assert torch.equal(again["t"], whole.T) and torch.equal(again["row"], whole[1])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, step, limit=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000010", "step_000011"]


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "no sums"])
def test_a_damaged_one_is_reported_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    before, damaged = save(tmp_path, 1), save(tmp_path, 2)
    file = damaged / "agent_0.safetensors"
    if harm == "flip":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif harm == "cut":
        os.truncate(file, 20)
    elif harm == "gone":
        file.unlink()
    else:
        (damaged / checkpoint.SUMS).write_text("[]")
    warnings: list[str] = []
    assert checkpoint.newest(tmp_path, warnings.append) == before
    assert len(warnings) == 1 and str(damaged) in warnings[0] and "damaged" in warnings[0]


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    """A run that continues from before a damaged checkpoint keeps what it saves on the way."""
    save(tmp_path, 1)
    damaged = save(tmp_path, 4)
    (damaged / "state.json").write_text("{")
    again = save(tmp_path, 2, limit=1)
    assert checkpoint.newest(tmp_path, lambda text: None) == again
    assert save(tmp_path, 4, limit=1) == checkpoint.newest(tmp_path)  # and is then replaced
    assert os.listdir(tmp_path / "checkpoints") == ["step_000004"]


def test_a_torn_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    """What a kill leaves is never read, and the next save clears it away."""
    torn = tmp_path / "checkpoints/.partial_000002"
    torn.mkdir(parents=True)
    (torn / "state.json").write_text("{}")
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 1)
    assert os.listdir(tmp_path / "checkpoints") == ["step_000001"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file above 64 KiB can be written: what a full disk is to a program."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, small_files: None) -> None:
    before = save(tmp_path, 1)
    large = {"agent_0": {"a": torch.zeros(1 << 16)}}  # 256 KiB
    with pytest.raises(CheckpointError, match=f"too large.*{before.name} is untouched") as raised:
        checkpoint.save(tmp_path, 2, {}, large)
    assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path / "checkpoints") == ["step_000001"]
    assert checkpoint.newest(tmp_path) == before


# ------------------------------------------------------------------- checkpoints of somebody else


def resum(folder: Path) -> None:
    """Sums that are right, of whatever lies there."""
    parts = [file for file in folder.iterdir() if file.name != checkpoint.SUMS]
    sums = {file.name: checkpoint._sum(file) for file in parts}
    (folder / checkpoint.SUMS).write_text(json.dumps(sums))


@pytest.mark.parametrize("sums", ["{}", "[]", "[" * 100_000, '{"../../x": "1"}', '{".": "1"}', "5"])
def test_sums_that_are_not_of_the_files(tmp_path: Path, sums: str) -> None:
    first = checkpoint.save(tmp_path, 1, {}, {"agent_0": {"w": torch.ones(1)}})
    second = checkpoint.save(tmp_path, 2, {}, {"agent_0": {"w": torch.ones(1)}})
    assert checkpoint.newest(tmp_path) == second
    (second / checkpoint.SUMS).write_text(sums)
    assert checkpoint.newest(tmp_path, lambda text: None) == first


def test_a_file_more_than_was_summed_is_damage(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, 1, {}, {"agent_0": {"w": torch.ones(1)}})
    (folder / "agent_1.safetensors").write_bytes((folder / "agent_0.safetensors").read_bytes())
    assert checkpoint.newest(tmp_path, lambda text: None) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("agent_0.safetensors", b""), ("agent_0.safetensors", b"\xff" * 99),
        ("state.json", b"[]"), ("state.json", b"[" * 100_000), ("state.json", b"\xff"),
    ],
)  # fmt: skip
def test_right_sums_of_wrong_files(tmp_path: Path, file: str, content: bytes) -> None:
    folder = checkpoint.save(tmp_path, 1, {}, {"agent_0": {"w": torch.ones(1)}})
    (folder / file).write_bytes(content)
    resum(folder)
    assert checkpoint.newest(tmp_path) == folder
    with pytest.raises(UserError, match=r"^--resume: .* cannot be read: ") as raised:
        checkpoint.read(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "x"}, {"steps": -1}, {"steps": True}, {"steps": 1.5}, {"evil": 1}, {"extra": []},
        {"evaluated": -2}, {"wall_seconds": float("nan")}, {"eval_start": 5},
    ],
)  # fmt: skip
def test_counters_are_counts(change: dict) -> None:
    held = json.loads(json.dumps(asdict(Counters(steps=3, eval_start={"reward_mean": 1.0}))))
    assert Counters.from_dict(held) == Counters(steps=3, eval_start={"reward_mean": 1.0})
    with pytest.raises((TypeError, ValueError)):
        Counters.from_dict(held | change)
