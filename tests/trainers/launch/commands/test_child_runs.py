"""The runner of child runs: small processes of the interpreter, or of the shell."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from comlrl.trainers.launch.commands.child_runs import ChildRun, run_all
from tests.support.processes import until


def child(folder: Path, name: str, script: str) -> ChildRun:
    line = ["sh", "-c", script]
    return ChildRun(key=name, line=line, log=folder / f"{name}.log", result=folder / name)


def test_errors_are_the_last_error_line_and_the_others_continue(tmp_path):
    runs = [
        child(tmp_path, "good", "echo fine"),
        child(tmp_path, "bad", "echo error: no.key; echo later; exit 2"),
        child(tmp_path, "mute", "exit 3"),
        child(tmp_path, "last", "true"),
    ]
    ended = {run.key: error for run, error, _ in run_all(runs, 2)}
    assert ended == {
        "good": None,
        "bad": "exit code 2: error: no.key",
        "mute": "exit code 3: no output",
        "last": None,
    }
    assert (tmp_path / "good.log").read_text() == "fine\n"


def test_finished_runs_are_not_run_again(tmp_path):
    (tmp_path / "a").touch()
    runs = [child(tmp_path, name, f"touch {tmp_path}/{name}") for name in "abc"]
    assert [(run.key, error) for run, error, _ in run_all(runs[:1], 1)] == [("a", None)]
    assert sorted(run.key for run, *_ in run_all(runs, 3)) == ["a", "b", "c"]
    assert not (tmp_path / "a.log").exists() and (tmp_path / "b.log").exists()


def test_a_run_is_drawn_when_it_can_start(tmp_path):
    """With two jobs, the third run is drawn after the first has been taken."""
    taken: list[str] = []

    def drawn() -> Iterator[ChildRun]:
        for number in range(5):
            assert len(taken) >= number - 1
            yield child(tmp_path, str(number), "true")

    for run, _, _ in run_all(drawn(), 2):
        taken.append(run.key)
    assert sorted(taken) == list("01234")


def test_runs_share_the_machine(tmp_path):
    runs = [child(tmp_path, str(i), f"touch {tmp_path}/on{i}; sleep 0.3; ls {tmp_path}; "
                  f"rm {tmp_path}/on{i}") for i in range(5)]  # fmt: skip
    list(run_all(runs, 2))
    for i in range(5):
        listed = (tmp_path / f"{i}.log").read_text().split()
        assert len([name for name in listed if name.startswith("on")]) <= 2


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_run_ends_the_others(tmp_path, code):
    runs = [
        child(tmp_path, "long", "trap 'exit 143' TERM; while :; do sleep 0.05; done"),
        child(tmp_path, "stopped", f"sleep 0.5; exit {code}"),
        child(tmp_path, "never", "true"),
    ]
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(run_all(runs, 2))
    assert time.monotonic() - started < 60
    assert not (tmp_path / "never.log").exists()


def test_leaving_early_ends_what_runs(tmp_path):
    runs = [child(tmp_path, "quick", "true"), child(tmp_path, "long", "exec sleep 600")]
    with contextlib.closing(run_all(runs, 2)) as ended:
        assert next(ended)[0].key == "quick"
    assert "sleep 600" not in _of_shell(tmp_path)


def _of_shell(folder: Path) -> str:
    """Command lines of processes whose output is in ``folder``."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder in (process / "fd" / "1").resolve().parents:
                lines.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return "\n".join(lines)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_runs_do_not_outlive_their_command(tmp_path, how):
    code = (
        "import sys, pathlib, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # nohup ignores it
        "from comlrl.trainers.launch.commands.child_runs import ChildRun, run_all\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "line = ['sh', '-c', f'touch {folder}/on; exec sleep 600']\n"
        "list(run_all([ChildRun(key=1, line=line, log=folder / 'log', result=folder / 'r')], 1))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], stderr=subprocess.DEVNULL)
    until((tmp_path / "on").exists, parent)
    parent.send_signal(how)
    parent.wait(timeout=120)
    until(lambda: "sleep 600" not in _of_shell(tmp_path))
