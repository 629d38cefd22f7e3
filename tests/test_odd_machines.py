"""What a run does where the machine, its user or its disk is not as it should be."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comlrl import files
from comlrl.config.sections import AgentModelConfig
from comlrl.errors import UserError
from comlrl.models.pretrained import load_model
from comlrl.rewards.code.reward import CodeReward
from comlrl.rewards.sandbox import launch
from comlrl.trainers.launch.commands import train as execution
from comlrl.types import JointAction
from tests.support import tiny_models
from tests.support.fakes import code_task
from tests.support.processes import python
from tests.support.runs import ROOT, Zygote, metrics, small, weights

ODD = str(ROOT / "tests/support/odd_machines.py")


# Disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Its own file system, of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems are root's to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


@pytest.mark.parametrize(
    "kilobytes", [4, 2500, *(pytest.param(size, marks=pytest.mark.slow) for size in (40, 700))]
)
def test_a_full_disk_loses_nothing(zygote: Zygote, disk: Path, kilobytes: int) -> None:
    """At the start, the second checkpoint, the best model, a log; then there is room."""
    folder = disk / "run"
    keys = ["output.save_best=true", "output.verbose=true"]
    arguments = [*small("magrpo", folder, max_steps=3, eval_interval=1), *keys]
    resize(disk, kilobytes)
    run = zygote.finish("magrpo", arguments, code=1)
    assert "error: " in run.output and "Traceback" not in run.output, run.output
    resize(disk, 64 << 10)
    zygote.finish("magrpo", [*arguments, "--resume"])
    assert metrics(folder)[-1]["update"] == 3
    assert {f.name for f in folder.iterdir() if f.name[0] == "."} == set()


def test_a_final_model_stays_until_the_next_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "final_model").mkdir()
    (tmp_path / "final_model/weights").write_text("old")

    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("new")
        if full:
            raise OSError(28, "No space left on device")

    run: Any = SimpleNamespace(
        run_dir=tmp_path, save=save, rollout=SimpleNamespace(sampler=None),
        config=SimpleNamespace(keeps_final_model=True, algorithm="magrpo"),
        loop=SimpleNamespace(progress=SimpleNamespace(begin=lambda work: None)),
    )  # fmt: skip
    for full, expected in ((True, "old"), (False, "new")):
        with pytest.raises(OSError if full else AttributeError):  # the loop has no counters
            execution._finish(run)
        assert (tmp_path / "final_model/weights").read_text() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["final_model"]


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_part(disk: Path) -> None:
    files.replace(disk / "a", "old")
    resize(disk, 64)
    with pytest.raises(OSError, match="No space"):
        files.replace(disk / "a", b"x" * (1 << 20))
    assert (disk / "a").read_text() == "old" and len(list(disk.iterdir())) == 1


# Rights


def test_a_user_without_rights(zygote: Zygote, tmp_path: Path) -> None:
    for path in (zygote.folder, tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    zygote.folder.chmod(0o777)  # for its logs
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    arguments = small("magrpo", locked / "run")
    run = zygote.start({"call": [ODD, "without_rights", ["magrpo", arguments]]})
    assert run.wait() == 2 and run.error == (
        f"output.dir: '{locked}/run' cannot be written (Permission denied); choose another folder"
    )


def test_a_read_only_disk(zygote: Zygote, disk: Path) -> None:
    (disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for more in ([], ["--resume"], ["output.overwrite=true"]):
        run = zygote.finish("magrpo", [*small("magrpo", disk / "run"), *more], code=2)
        assert "cannot be written (Read-only file system)" in run.error


# Clock and locale


def test_a_clock_that_jumps_changes_nothing(zygote: Zygote, tmp_path: Path) -> None:
    runs = []
    for name in ("jumping_clock", "steady"):
        arguments = small("magrpo", tmp_path / name, max_steps=2)
        call = {"call": [ODD, name, ["magrpo", arguments]]}
        runs.append(zygote.run("magrpo", arguments) if name == "steady" else zygote.start(call))
    assert [run.wait() for run in runs] == [0, 0], runs[0].output
    jumped, steady = tmp_path / "jumping_clock", tmp_path / "steady"
    assert metrics(jumped) == metrics(steady)
    ours, theirs = weights(jumped), weights(steady)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    seconds = [json.loads(line)["metrics"] for line in (jumped / "metrics.jsonl").open()]
    assert all(0 <= value < 600 for line in seconds for k, value in line.items() if "second" in k)


def test_a_terminal_that_is_not_utf_8_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    files.tolerant_terminal()
    print("1 → 2, caf\udcc3")
    sys.stdout.flush()
    assert written.getvalue() == b"1 \\u2192 2, caf\\udcc3\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_that_nobody_reads_is_discarded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", encoding="utf-8")
    monkeypatch.setattr(sys, name, stream)
    files.tolerant_terminal()
    print("first", file=getattr(sys, name), flush=True)
    assert os.read(reader, 100) == b"first\n"
    os.close(reader)
    for text in ("second", "x" * 100_000, "third"):
        print(text, file=getattr(sys, name), flush=True)


def test_what_starts_a_sandbox_is_ascii() -> None:
    """It is a part of a command line, which is encoded as the locale says."""
    assert launch._bootstrap({"directory": "/tmp/é"}).isascii()


ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


def test_bytes_that_the_locale_does_not_have_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "train_magrpo.py", "--config", "magrpo_quickstart", "--override",
         f"output.dir={tmp_path}/rün"], env=os.environ | ASCII, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert b"output.dir" in done.stderr and b"PYTHONUTF8=1" in done.stderr


@pytest.mark.slow
def test_a_run_where_the_locale_is_not_utf_8(tmp_path: Path) -> None:
    arguments = [*small("magrpo", tmp_path / "run"), "output.save_final_model=true"]
    commands = (
        ["train_magrpo.py", *arguments],
        ["train_magrpo.py", *arguments, "magrpo.max_steps=5", "--resume"],
        ["-m", "comlrl.trainers.launch", "--help"],
        ["-m", "comlrl.trainers.launch", "report", str(tmp_path / "run")],
        ["-m", "comlrl.trainers.launch", "export", str(tmp_path / "run")],
        ["evaluate.py", "--checkpoint", str(tmp_path / "run")],
    )
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], env=os.environ | ASCII, cwd=ROOT, capture_output=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)


# Folders that somebody else has prepared


def test_links_in_the_output_folder_are_not_written_through(zygote: Zygote, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    for name in (".config.yaml.partial", ".summary.json.partial", "report.html", "curves.png",
                 "model_card.md", "samples.jsonl", "environment.json"):  # fmt: skip
        (outside / name).write_text("theirs")
        (folder / name).symlink_to(outside / name)
    for name in (".best_model.partial", ".best_model.old", ".final_model.partial"):
        (outside / name).mkdir()
        (outside / name / "theirs").touch()
        (folder / name).symlink_to(outside / name)
    arguments = small("magrpo", folder, max_steps=1, eval_interval=1)
    zygote.finish("magrpo", [*arguments, "output.save_best=true"])
    for path in outside.iterdir():
        found = [p.name for p in path.iterdir()] if path.is_dir() else path.read_text()
        assert found in (["theirs"], "theirs"), path
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_checkpoints_may_lie_on_another_disk(zygote: Zygote, tmp_path: Path) -> None:
    """A link that the user has made is followed: folders are not taken for links' sake."""
    folder, other = tmp_path / "run", tmp_path / "other"
    zygote.finish("magrpo", small("magrpo", folder, max_steps=1))
    shutil.move(folder / "checkpoints", other)
    (folder / "checkpoints").symlink_to(other)
    zygote.finish("magrpo", [*small("magrpo", folder, max_steps=2), "--resume"])
    assert (other / "step_000002").is_dir() and (folder / "checkpoints").is_symlink()


def test_a_link_that_leads_nowhere_is_no_free_folder(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nowhere" / "metrics.jsonl")
    assert "holds a run" in zygote.finish("magrpo", small("magrpo", tmp_path), code=2).error


# Models of others


class Evil:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def model(folder: Path) -> Path:
    return Path(shutil.copytree(tiny_models.folder("qwen2"), folder / "model"))


def loaded(folder: Path) -> Any:
    return load_model(AgentModelConfig(name=str(folder)), str(folder), "cpu")[0]


def test_pickled_weights_are_tensors_or_refused(tmp_path: Path) -> None:
    folder, trace = model(tmp_path), tmp_path / "trace"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found = loaded(folder).state_dict()
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"])
    torch.save({**tensors, "x": Evil(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="hold more than tensors"):
        loaded(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(UserError, match="hold more than tensors"):
        loaded(folder)
    assert not trace.exists()


def test_code_of_a_model_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'trace')!r})")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(UserError, match="contains custom code"):
        loaded(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"\xff" * 8), ("model.safetensors", b""), ("config.json", b"[1]"),
        ("config.json", b"[" * 100_000), ("tokenizer.json", b"{}"),
    ],
)  # fmt: skip
def test_damaged_models_are_refused_in_a_line(tmp_path: Path, file: str, content: bytes) -> None:
    folder = model(tmp_path)
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=r"^agent_model\.name: .* cannot be loaded: ") as raised:
        loaded(folder)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"import os, sys; os.rmdir({str(gone)!r}); sys.path.insert(0, {str(ROOT)!r}); "
    line += "import train_magrpo; from comlrl.trainers.launch.commands import train; "
    line += "sys.exit(train.main('magrpo', None, ['--config', 'magrpo_quickstart', '--dry-run']))"
    done = python("-c", line, cwd=gone, code=2)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "working directory" in done.stderr


def test_a_sandbox_needs_no_path(monkeypatch):
    from comlrl.rewards.run_python import run_python

    monkeypatch.setenv("PATH", "")
    assert run_python("open('a', 'w'); print(1)", memory_mb=300).output == "1\n"
    with CodeReward(1, 5.0) as reward:
        task = code_task("t", "", "def check(candidate):\n    assert candidate(1) == 1\n", "f")
        (score,) = reward.score([JointAction(task, ("def f(x):\n    return x\n",))])
    assert score.passed
