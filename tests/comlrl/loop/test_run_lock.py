"""Two runs in one folder: the second is refused, whatever it wants to do there."""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.synchronize
import os
import signal
from pathlib import Path

import pytest

from comlrl.errors import UserError
from comlrl.loop.run_directory import find
from comlrl.loop.run_lock import FILE, hold, holder
from tests.support import tiny_models
from tests.support.runs import Zygote, metrics, newest_step, small


def _keep(folder: Path, held: multiprocessing.synchronize.Event) -> None:
    with hold(folder):
        held.set()
        signal.pause()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=_keep, args=(tmp_path, held))
    other.start()
    assert held.wait(60)
    assert str(holder(tmp_path)).startswith(f"process {other.pid} on ")
    with pytest.raises(UserError, match=f"is in use by process {other.pid} on "), hold(tmp_path):
        pass
    other.kill()
    other.join()
    assert (tmp_path / FILE).exists() and holder(tmp_path) is None
    with hold(tmp_path):
        assert str(holder(tmp_path)).startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_removed_by_its_holder_is_no_lock(tmp_path: Path) -> None:
    """Whoever opened it before must not believe in it afterwards: two could hold one each."""
    with hold(tmp_path):
        before = os.open(tmp_path / FILE, os.O_RDWR)
    fcntl.flock(before, fcntl.LOCK_EX)
    with hold(tmp_path):
        assert holder(tmp_path) is not None
    os.close(before)
    with hold(tmp_path):
        tmp_path.rename(tmp_path.with_name("aside"))  # with the lock's file in it
        tmp_path.mkdir()
        assert holder(tmp_path) is None
        assert holder(tmp_path.with_name("aside")) is not None


def test_numbered_folders_leave_out_one_in_use(tmp_path: Path) -> None:
    """Two runs that start at the same time: neither has written anything yet."""
    config = tiny_models.config(output__base_dir=str(tmp_path), seed=7)
    first = find(config.output, "run", False)
    first.mkdir()
    with hold(first):
        assert find(config.output, "run", False) != first
        with pytest.raises(UserError, match="is in use"):
            find(config.output, "run", True)
    assert find(config.output, "run", False) == first


def test_a_lock_that_is_a_link_or_a_folder_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / FILE).symlink_to(victim)
    with pytest.raises(UserError, match="cannot be written"), hold(tmp_path):
        pass
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_run_in_a_folder_is_refused_until_the_first_is_killed(
    zygote: Zygote, tmp_path: Path, processes: int
) -> None:
    folder = tmp_path / "run"
    arguments = small("magrpo", folder, max_steps=100_000, eval_interval=0)
    runs = zygote.run_team(processes, "magrpo", arguments)
    runs[0].until(lambda: newest_step(folder) > 0)
    for more in (["--resume"], ["output.overwrite=true"], []):
        second = zygote.finish("magrpo", [*arguments, *more], code=2)
        holder = f"process {runs[0].pid}"
        assert second.error.startswith(f"output.dir: '{folder}' is in use by {holder}")
    assert all(run.code() is None for run in runs) and not (tmp_path / "run.1").exists()
    for run in runs:
        run.kill()
        run.wait()
    step = newest_step(folder)
    further = [*arguments, f"magrpo.max_steps={step + 1}", "--resume"]
    zygote.finish_team(processes, "magrpo", further)
    assert metrics(folder)[-1]["update"] == step + 1 and not (folder / FILE).exists()
