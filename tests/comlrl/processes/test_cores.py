"""A container's CPU quota, of both kinds of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from comlrl.processes import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000\n"}, 2),
        (
            "4:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 64),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "10000"}, 5),
        ("", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("strange", {"cpu.max": "what is this"}, 64),
        ("5:cpuset:/\n", {}, 64),
    ],
)
def test_the_quota_of_a_container_counts(machine, membership, files, count):
    write(machine / "self", membership)
    for name, text in files.items():
        write(machine / "cgroup" / name, text)
    assert cores.available_cores() == count


def test_cores_without_control_groups(machine):
    assert cores.available_cores() == 64
