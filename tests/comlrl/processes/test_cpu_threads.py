"""How many threads a run computes with, beside other programs. Real processes keep cores busy."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl.processes import cpu_threads
from comlrl.processes.cpu_threads import STATE, LoadWatch, idle_cores
from comlrl.run_files import ENVIRONMENT
from tests.support.runs import ROOT, small

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("threads", "cores", "busy", "expected"),
    [
        (2, 2, 0.4, 2),  # a browser
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),  # never none
        (16, 16, 3.3, 13),
        (4, 16, 3.3, 4),  # torch found fewer than there are cores
    ],
)
def test_threads_are_as_many_as_idle_cores(
    threads: int, cores: int, busy: float, expected: int
) -> None:
    assert idle_cores(threads, cores, busy) == expected


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Others that keep cores busy."""
    with contextlib.ExitStack() as running:
        for _ in range(processes):
            process = running.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
            )
            running.callback(process.kill)
        yield


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A number of threads that nobody has set, put back at the end."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("free")
@pytest.mark.skipif(CORES < 2, reason="one core")
def test_every_core_busy_with_others_leaves_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with busy(2 * CORES):  # twice: this process takes its share of a core too
        watch = LoadWatch()
        watch.set_threads()
    assert torch.get_num_threads() == 1
    assert f"of {CORES} cores busy: computing with 1 thread (OMP_NUM" in capsys.readouterr().err


STAT = """cpu  900 900 900 900 900 900 900 900 0 0
cpu0 {user} 10 20 8000 70 1 2 0 0 0
cpu1 100 0 0 8000 0 0 0 50 0 0
intr 12 3
"""


def test_seconds_are_those_of_the_cores_given() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    # idle, waiting for the disk, and taken by the host are nobody's work
    assert cpu_threads.busy_seconds(STAT.format(user=300), {0}) == pytest.approx(333 * tick)
    assert cpu_threads.busy_seconds(STAT.format(user=300), {0, 1}) == pytest.approx(433 * tick)
    assert cpu_threads.busy_seconds("", {0}) == 0  # as gVisor


@pytest.mark.usefixtures("free")
def test_own_work_is_not_that_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it watches for at least half a second, 10 s are computed, all but 0.1 s by itself."""
    stat, second = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(cpu_threads, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    own = iter([3.0, 12.9])
    monkeypatch.setattr(cpu_threads, "own_seconds", lambda: next(own))
    torch.set_num_threads(2)
    stat.write_text(STAT.format(user=0))
    watch = LoadWatch()
    stat.write_text(STAT.format(user=10 * second))
    watch.set_threads()
    assert torch.get_num_threads() == 2
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(("state", "expected"), [
    ({STATE: [1, CORES]}, 1),  # as the run that is continued
    ({STATE: [1, CORES + 1]}, CORES),  # another machine
    ({}, CORES),  # of an earlier version
])  # fmt: skip
def test_a_continued_run_takes_its_number_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "none")  # macOS: nothing tells the load
    LoadWatch().set_threads(state)
    assert torch.get_num_threads() == expected
    assert cpu_threads.state() == {STATE: (expected, CORES)}


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "WORLD_SIZE"])
@pytest.mark.usefixtures("free")
def test_a_number_that_was_given_stays(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")
    with busy(2 * CORES):
        LoadWatch().set_threads({STATE: [1, CORES]})
    assert torch.get_num_threads() == CORES


@pytest.mark.slow
def test_a_resumed_run_computes_with_its_threads(tmp_path: Path) -> None:
    """Begun with one thread because others were busy, continued when they are not."""
    run = tmp_path / "run"

    def threads(*more: str, **environment: str) -> int:
        given = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        command = [sys.executable, "train_magrpo.py", *small("magrpo", run), *more]
        subprocess.run(command, cwd=ROOT, env=given | environment, check=True, timeout=120)
        return json.loads((run / ENVIRONMENT).read_text())["cpu_threads"]

    assert threads("magrpo.max_steps=1", OMP_NUM_THREADS="1") == 1
    assert threads("magrpo.max_steps=2", "--resume") == 1
    assert threads("magrpo.max_steps=3", "--resume", OMP_NUM_THREADS="2") == 2
