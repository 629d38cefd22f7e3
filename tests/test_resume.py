"""Exact resume: real runs, killed and interrupted, against one that nobody disturbed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl import files
from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.loop import checkpoint
from comlrl.loop.resume import Change, prepare, write_config
from tests.support import tiny_models
from tests.support.runs import (
    ALGORITHMS,
    Process,
    Zygote,
    assert_same,
    metrics,
    newest_step,
    small,
    small_of,
)


def has_begun(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and bool((run_dir / "metrics.jsonl").read_text())


def with_delay(run: Process, seconds: float) -> None:
    """Let a run continue for a while."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and run.code() is None:
        time.sleep(0.01)


BEST = "output.save_best=true"


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    zygote.finish("magrpo", [*small("magrpo", folder), BEST])
    return folder


def test_killed_at_any_moment(zygote: Zygote, tmp_path: Path, undisturbed: Path) -> None:
    """SIGKILL at random moments, each in the attempt that continues the one before."""
    folder, moments = tmp_path / "run", random.Random()
    arguments = [*small("magrpo", folder), BEST]
    for kill in range(3):
        run = zygote.run("magrpo", [*arguments, *(["--resume"] if kill else [])])
        step = newest_step(folder)
        run.until(lambda run=run, step=step: newest_step(folder) > step or run.code() is not None)
        with_delay(run, moments.uniform(0, 1.0))
        run.kill()
        run.wait()
    zygote.finish("magrpo", [*arguments, "--resume"])
    assert_same(folder, undisturbed)


ORDERED = {
    "turn_order": "sequential", "num_turns": 2, "handoff": "random", "handoff_width": 2,
    "num_agents": 3, "top_p": 0.9,
}  # fmt: skip
# masters hold more than the bfloat16 weights that a checkpoint has beside them
MASTERS = ["lora.enabled=false", "agent_model.torch_dtype=bfloat16", "magrpo.learning_rate=1e-4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys", "more"),
    [
        ("magrpo", ORDERED, []),
        ("magrpo", {}, MASTERS),
        ("shppo", {"latent_gradient": "policy", "num_turns": 2, "eval_interval": 0}, []),
        ("shppo", {"latents": "sampled", "eval_interval": 0}, []),
    ],
    ids=["in order", "masters", "policy gradient of latents", "sampled latents"],
)
def test_killed_after_a_step_it_goes_on_exactly(
    zygote: Zygote, tmp_path: Path, algorithm: str, keys: dict[str, Any], more: list[str]
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    keys = {**keys, "max_steps": 3}
    zygote.finish(algorithm, [*small(algorithm, whole, **keys), *more])
    if keys.get("turn_order") == "sequential":
        # Each task: 2 · 2 · 2 joint actions of turn 1, two of which are continued by as many.
        steps = [line["step"] for line in metrics(whole) if line["phase"] == "train"]
        assert steps == [48, 96, 144]
    zygote.kill_and_resume(algorithm, [*small(algorithm, folder, **keys), *more], folder)
    assert_same(folder, whole)


HELD = """
import itertools, pathlib, time
from comlrl.rewards.code.reward import CodeReward

HERE = pathlib.Path(__file__).parent


class Held(CodeReward):
    def __init__(self):
        self.calls = itertools.count(1)
        self.reach("start")
        super().__init__()

    def score(self, actions):
        self.reach(str(next(self.calls)))
        return super().score(actions)

    def reach(self, place):
        if (HERE / "hold").exists() and (HERE / "hold").read_text() == place:
            (HERE / "held").touch()
            while (HERE / "hold").exists():
                time.sleep(0.02)
"""
EVALUATION, STEP_1 = "1", "2"  # calls of the reward


def run_held(zygote: Zygote, folder: Path, place: str, *more: str, **keys: Any) -> Process:
    """A run that stands still at a place, however slow the machine is, while `hold` is there."""
    beside = folder.parent
    (beside / "held.py").write_text(HELD)
    (beside / "hold").write_text(place)
    run = zygote.run("magrpo", arguments_held(folder, *more, **keys))
    run.until((beside / "held").exists)
    return run


def arguments_held(folder: Path, *more: str, **keys: Any) -> list[str]:
    _, file, *rest = small("magrpo", folder, **keys)
    beside = shutil.copy(file, folder.parent)
    return ["--config", beside, *rest, "reward.target=held:Held", *more]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_resume(
    zygote: Zygote, tmp_path: Path, undisturbed: Path, number: int, code: int
) -> None:
    """No periodic checkpoint: what is resumed is what the signal saved."""
    folder = tmp_path / "run"
    run = run_held(zygote, folder, STEP_1, BEST, save_steps=0)
    run.send(number)
    run.until(lambda: "finishing this step" in run.output)
    (tmp_path / "hold").unlink()
    assert run.wait() == code, run.output
    assert newest_step(folder) == 1
    assert f"saved {folder}/checkpoints/step_000001" in run.output
    assert "not finished" in (folder / "report.html").read_text()
    zygote.finish("magrpo", arguments_held(folder, BEST, "--resume"))
    assert_same(folder, undisturbed)


def test_a_signal_during_evaluation_abandons_it(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = run_held(zygote, folder, EVALUATION, save_steps=0)
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert not has_begun(folder)
    assert newest_step(folder) == 0 and "step_000000" in run.output


def test_a_signal_during_start_up(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = run_held(zygote, folder, "start")
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert "interrupted: SIGTERM" in run.output
    assert not (folder / "checkpoints").exists()


def test_a_second_ctrl_c_leaves_at_once(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = run_held(zygote, folder, STEP_1)
    run.send(signal.SIGINT)
    run.until(lambda: "finishing this step" in run.output)
    run.send(signal.SIGINT)
    assert run.wait() in (-signal.SIGINT, 130)
    assert newest_step(folder) == 0


def test_resume_where_nothing_is_starts_anew(
    zygote: Zygote, tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "run"
    run = zygote.finish("magrpo", [*small("magrpo", folder), BEST, "--resume"])
    assert "a fresh start" in run.output
    assert_same(folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_survives_kills(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    """Up to four kills of each algorithm, anywhere from the first import to the last line written;
    fewer where a run ends before its kill, being faster than the undisturbed one was."""
    arguments = small_of(algorithm, tmp_path / "undisturbed")
    started = time.monotonic()
    run = zygote.finish(algorithm, arguments, seconds=600)
    whole = time.monotonic() - started
    folder, moments = tmp_path / "run", random.Random()
    arguments = small_of(algorithm, folder)
    kills = 0
    while kills < 4:
        run = zygote.run(algorithm, [*arguments, *(["--resume"] if kills else [])])
        with_delay(run, moments.uniform(0.1, 0.6) * whole)
        if run.code() is not None:
            assert run.code() == 0, run.output
            if kills:
                break
            whole /= 2
            shutil.rmtree(folder)
            continue
        kills += 1
        run.kill()
        run.wait()
    zygote.finish(algorithm, [*arguments, "--resume"], seconds=600)
    assert_same(folder, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        pytest.param("madpo", [1], marks=pytest.mark.slow),
        pytest.param("madpo", [2, 3], marks=pytest.mark.slow),
        pytest.param("marlhf", [2, 3], marks=pytest.mark.slow),
    ],
)
def test_rounds_go_on_in_their_middle(
    zygote: Zygote, tmp_path: Path, algorithm: str, steps: list[int]
) -> None:
    """Killed in the second of two rounds of two steps, with newer labels than its checkpoint: of
    the first round's middle, of its end, of the second round's middle."""
    whole = tmp_path / "undisturbed"
    more = [f"{algorithm}.save_total_limit=null", f"{algorithm}.replay=all"]
    zygote.finish(algorithm, [*small_of(algorithm, whole), *more], seconds=600)
    for step in steps:
        folder = tmp_path / str(step)
        shutil.copytree(whole, folder)
        for later in range(step + 1, 5):
            shutil.rmtree(folder / f"checkpoints/step_{later:06d}")
        zygote.finish(algorithm, [*small_of(algorithm, folder), *more, "--resume"], seconds=600)
        assert_same(folder, whole)


def test_a_finished_run_resumed_further(zygote: Zygote, tmp_path: Path) -> None:
    """max_steps is harmless: two steps and then two more are four."""
    folder = tmp_path / "run"
    for steps in (2, 4):
        arguments = small("magrpo", folder, max_steps=steps, eval_interval=0)
        run = zygote.finish("magrpo", [*arguments, "--resume"])
    assert "magrpo.max_steps: 2 → 4" in run.output
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "summary.json").read_text())["updates"] == 4


# Where a run begins


def configured(folder: Path, **keys: Any) -> Config:
    return tiny_models.config(output__dir=str(folder), **keys)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def begun(folder: Path, *, saved: bool = True, overwrite: bool = False, **keys: Any) -> None:
    """A run directory as a run leaves it."""
    config = configured(folder, output__overwrite=overwrite, **keys)
    write_config(prepare(config, False, False))
    if saved:
        checkpoint.save(folder, 3, {}, {"agent_0": {"w": torch.ones(1)}})


def test_an_unchanged_configuration_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    begun(tmp_path)
    start = prepare(configured(tmp_path), True, False)
    assert start.checkpoint == tmp_path / "checkpoints/step_000003" and start.continuing
    assert capsys.readouterr().err == ""


def test_harmless_changes_are_named_and_go_through(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    begun(tmp_path, max_steps=5)
    changed = configured(
        tmp_path, max_steps=9, logging_steps=3, save_steps=7, wandb__project="other",
        generation__max_batch_tokens=99, sandbox__workers=1, output__verbose=True,
    )  # fmt: skip
    assert prepare(changed, True, False).checkpoint is not None
    notices = capsys.readouterr().err
    assert "magrpo.max_steps: 5 → 9" in notices and "wandb.project: None → 'other'" in notices
    assert notices.count("notice: ") == 8  # the seven, and wandb.tags, which a section brings along


def test_other_changes_are_refused_unless_forced(tmp_path: Path) -> None:
    begun(tmp_path)
    changed = configured(tmp_path, learning_rate=0.5, lora__r=3, sandbox__timeout=1.0)
    with pytest.raises(UserError) as raised:
        prepare(changed, True, False)
    assert str(raised.value).startswith("lora.r: 3 differs from the run's 16; so do ")
    assert "magrpo.learning_rate, sandbox.timeout" in str(raised.value)
    assert "--resume-force" in str(raised.value)
    assert prepare(changed, True, True).checkpoint is not None


@pytest.mark.parametrize(
    ("key", "harmless"),
    [
        ("magrpo.max_steps", True), ("generation.vllm_url.aux", True), ("output.verbose", True),
        ("reward.arguments.max_steps", False), ("prompts.save_steps", False), ("seed", False),
    ],
)  # fmt: skip
def test_a_name_that_the_user_chose_is_not_a_harmless_key(key: str, harmless: bool) -> None:
    assert Change(key, 1, 2).harmless == harmless


def test_without_a_checkpoint_it_is_a_fresh_start(tmp_path: Path) -> None:
    """What lies there is gone on with only where the same configuration left it."""
    begun(tmp_path, saved=False)
    assert prepare(configured(tmp_path), True, False).continuing
    with pytest.raises(UserError, match=r"magrpo.learning_rate: 0.5 differs"):
        prepare(configured(tmp_path, learning_rate=0.5), True, False)


def test_a_folder_that_holds_a_run_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    """Without --resume, by the script and with --dry-run; no byte of it is changed."""
    begun(tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 18}\n')
    before = contents(tmp_path / "run")
    for more in ([], ["--dry-run"]):
        run = zygote.finish("magrpo", [*small("magrpo", tmp_path / "run"), *more], code=2)
        assert run.error.startswith(f"output.dir: '{tmp_path}/run' holds a run; add --resume")
        assert "output.overwrite=true" in run.error
        assert contents(tmp_path / "run") == before


def test_overwrite_moves_all_of_an_earlier_run_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        begun(tmp_path / "run", overwrite=number > 1)
        (tmp_path / "run/metrics.jsonl").write_text(f"{number}\n")
        (tmp_path / "run/evaluation.json").write_text("{}")
    start = prepare(configured(tmp_path / "run", output__overwrite=True), False, False)
    assert list(start.run_dir.iterdir()) == [] and not start.continuing
    assert not start.config.output.overwrite  # config.yaml repeats the run and moves nothing
    assert (tmp_path / "run.1/metrics.jsonl").read_text() == "1\n"
    assert (tmp_path / "run.2/metrics.jsonl").read_text() == "2\n"
    assert (tmp_path / "run.2/checkpoints/step_000003").exists()
    with pytest.raises(UserError, match=r"set output\.dir"):
        tiny_models.config(output__overwrite=True)


def test_resuming_a_finished_run_without_checkpoints_loses_nothing(tmp_path: Path) -> None:
    begun(tmp_path / "run", saved=False)
    (tmp_path / "run/summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"--resume: .* holds a finished run and no checkpoint"):
        prepare(configured(tmp_path / "run"), True, False)
    assert prepare(configured(tmp_path / "run", output__overwrite=True), True, False)
    assert (tmp_path / "run.1/summary.json").exists()


def test_a_run_whose_checkpoints_are_all_damaged_is_kept(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_000003/state.json").write_text("?")
    assert prepare(configured(tmp_path / "run"), True, False).checkpoint is None
    assert (tmp_path / "run.1/checkpoints/step_000003/state.json").read_text() == "?"


def test_numbered_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_models.config(output__base_dir=str(tmp_path), seed=7)
    first = prepare(config, True, False)  # nothing to resume: the first one, not one before it
    write_config(first)
    capsys.readouterr()
    second = prepare(config, False, False)
    assert f"'{second.run_dir}'" in capsys.readouterr().err  # a taken name is told
    write_config(second)
    names = [first.run_dir.name, second.run_dir.name]
    assert names == ["magrpo_coopmini_7", "magrpo_coopmini_7_2"]
    assert prepare(config, True, False).run_dir == second.run_dir


def test_lines_behind_the_checkpoint_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"')  # the last one torn by a kill
    files.keep(log, lambda index, _: index < 2)
    assert log.read_text() == '{"a": 1}\n{"a": 2}\n'
    files.keep(log, lambda index, _: index < 5)
    assert log.read_text() == '{"a": 1}\n{"a": 2}\n'
    files.keep(tmp_path / "none", lambda index, _: index < 2)
    assert not (tmp_path / "none").exists()
