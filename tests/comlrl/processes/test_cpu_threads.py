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
from tests.support.processes import python
from tests.support.runs import small

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
    error = capsys.readouterr().err
    assert error.startswith("notice: computing with 1 thread: other programs keep")


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
    assert cpu_threads.busy_seconds("cpu0 0 0 0 0 0 0 0 0 0 0\n", {0}) == 0  # as gVisor


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
    ({STATE: [3, 4, 1]}, 3),  # as the run that is continued
    ({STATE: [3, 8, 1]}, 4),  # another machine
    ({STATE: [1, 4, 2]}, 4),  # by torchrun, which gives each process one
    ({}, 4),  # of an earlier version
])  # fmt: skip
def test_a_continued_run_takes_its_number_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: dict[str, Any],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "none")  # nothing tells the load
    torch.set_num_threads(4)
    LoadWatch().set_threads(state)
    assert torch.get_num_threads() == expected
    assert cpu_threads.state() == {STATE: [expected, 4, 1]}
    assert ("computing with 3 threads: as before" in capsys.readouterr().err) == (expected == 3)


@pytest.mark.usefixtures("free")
@pytest.mark.skipif(CORES < 2, reason="one core")
def test_a_continued_run_tells_that_others_compute(capsys: pytest.CaptureFixture[str]) -> None:
    with busy(2 * CORES):
        LoadWatch().set_threads({STATE: [CORES, CORES, 1]})
    assert torch.get_num_threads() == CORES
    error = capsys.readouterr().err
    assert f"computing with {CORES} threads: as before; other programs keep" in error


@pytest.mark.usefixtures("free")
def test_a_bound_thread_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_PROC_BIND binds the first thread to one core, and the others to the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    torch.set_num_threads(2)
    LoadWatch().set_threads()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("free")
def test_a_load_of_another_form_is_no_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(cpu_threads, "STAT", stat)
    stat.write_text("cpu0 1 2 3\n")
    LoadWatch().set_threads()
    assert torch.get_num_threads() == CORES


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "WORLD_SIZE"])
@pytest.mark.usefixtures("free")
def test_a_number_that_was_given_stays(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")
    with busy(2 * CORES):
        LoadWatch().set_threads({STATE: [1, CORES, 1]})
    assert torch.get_num_threads() == CORES


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="one core")
def test_runs_look_at_the_load_when_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun beside others with one thread, continued with it when they have left; an evaluation
    looks for itself."""
    run = tmp_path / "run"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def trained(*more: str, **environment: str) -> int:
        python("train_magrpo.py", *small("magrpo", run), *more, **environment)
        return json.loads((run / ENVIRONMENT).read_text())["cpu_threads"]

    with busy(2 * CORES):
        assert trained("magrpo.max_steps=1") == 1
        output = python("evaluate.py", "--checkpoint", run).stderr
        assert "computing with 1 thread: other programs" in output
    assert trained("magrpo.max_steps=2", "--resume") == 1
    assert trained("magrpo.max_steps=3", "--resume", OMP_NUM_THREADS="2") == 2
