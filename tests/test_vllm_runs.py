"""Whole runs whose completions come from a server, here the generator behind the same endpoints."""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import HTTPException

from comlrl.rollout.vllm.processes import free_port
from tests.support.fake_vllm import FakeVLLM
from tests.support.processes import is_running
from tests.support.runs import ROOT, Process, Zygote, assert_in_sync, newest_step
from tests.support.vllm_runs import (
    A_STEP,
    LEARNING,
    asked,
    fake_server,
    has_logged,
    has_trained,
    lines,
    ratios,
)


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = fake_server()
    yield fake
    fake.stop()


@pytest.mark.parametrize(
    "algorithm", ["magrpo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("ppo", "madpo"))]
)
def test_a_run_by_a_server(zygote: Zygote, server: FakeVLLM, tmp_path: Path, algorithm) -> None:
    """Each update's adapters are loaded, those before unloaded; all weigh 1."""
    folder = tmp_path / "run"
    keys = {"num_agents": 2, "max_new_tokens": 24, "num_generations": 4}
    if algorithm == "madpo":
        keys |= {"preference_num_candidates": 6, "num_iterations": 1}
    arguments = asked(algorithm, folder, server.url, max_steps=3, save_steps=0, **keys)
    run = zygote.finish(algorithm, [*arguments, "dataset.train_split=train[:8]"])
    assert "warning" not in run.output and not (folder / "vllm").exists()
    assert server.adapters == {}
    loads = [name for what, name in server.events if what == "load"]
    assert sorted(loads) == sorted({name for what, name in server.events if what == "unload"})
    if algorithm == "madpo":  # sampled from once; evaluated before, and after steps 2 and 3
        assert Counter(name.split("-")[0] for name in loads) == {"agent_0": 3, "agent_1": 3}
    else:
        assert Counter(name.split("-")[0] for name in loads) == {"agent_0": 4, "agent_1": 4}
        assert ratios(folder) == pytest.approx([1] * 3, abs=1e-3)


def of_agent_0(server: FakeVLLM) -> list[str]:
    """What the server did with its adapters, which are numbered; repetitions left out."""
    events = [(what, name) for what, name in server.events if name.startswith("agent_0")]
    names = [name for what, name in events if what == "load"]
    labels = [f"{what} {names.index(name)}" for what, name in events]
    return [one for one, _ in itertools.groupby(labels)]


@pytest.mark.parametrize(
    ("overlap", "turns"), [(1, 2), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (0, 1))]
)
def test_a_step_may_be_grown_while_the_one_before_updates(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, overlap: int, turns: int
) -> None:
    """A step's first requests are answered once the step before is through, and all its turns are
    by the adapters from before. The weights after the last step are not sent."""
    folder, numbers, over = tmp_path / "run", itertools.count(), threading.Event()
    a_step = A_STEP + (turns - 1) * A_STEP  # later turns continue one joint action

    def before(body: dict) -> None:
        if body["model"] != "base":
            server.events.append(("ask", body["model"]))
            steps = next(numbers) // a_step
            while overlap and not has_logged(folder, steps) and not over.wait(0.05):
                pass

    server.before = before
    keys = LEARNING | {"max_steps": 3, "save_steps": 0, "num_turns": turns, "handoff": "best"}
    if turns == 1:
        del keys["handoff"]
    arguments = asked("magrpo", folder, server.url, **keys)
    run = zygote.run("magrpo", [*arguments, f"generation.overlap={overlap}"])
    try:
        assert run.wait() == 0, run.output
    finally:
        over.set()
    assert of_agent_0(server) == [
        ["load 0", "ask 0", "load 1", "unload 0", "ask 1", "load 2", "unload 1", "ask 2",
         "unload 2"],
        ["load 0", "ask 0", "load 1", "unload 0", "ask 1", "unload 1"],
    ][overlap]  # fmt: skip
    models = [body["model"] for body in server.asked if body["model"].startswith("agent_0")]
    half = a_step // 2
    assert list(Counter(models).values()) == [[half] * 3, [2 * half, half]][overlap]
    found = ratios(folder)
    assert found[0] == pytest.approx(1, abs=1e-3)
    assert (found[1:] == pytest.approx([1, 1], abs=1e-4)) == (not overlap)
    assert server.adapters == {} and not (folder / "vllm").exists()


OVERLAPPED = LEARNING | {"max_steps": 5, "save_steps": 2, "num_turns": 2, "handoff": "random"}


def learned(folder: Path) -> list[dict]:
    """What a run has logged of its steps, without times and other measures of the machine."""
    left_out = ("seconds", "time", "memory", "per_second")
    return [
        {k: v for k, v in line["metrics"].items() if not any(word in k for word in left_out)}
        for line in lines(folder)
    ]


@pytest.mark.slow
def test_a_killed_run_grows_the_same_trees_again(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """Against a server that repeats itself, all is bit-equal to what was never killed."""
    server.repeats = True
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run(folder: Path, *more: str) -> Process:
        arguments = asked("magrpo", folder, server.url, **OVERLAPPED)
        return zygote.run("magrpo", [*arguments, "generation.overlap=1", *more])

    first = run(whole)
    assert first.wait() == 0, first.output
    numbers, over = itertools.count(), threading.Event()

    def before(body: dict) -> None:
        if body["model"] != "base" and next(numbers) >= 3 * 2 * A_STEP:  # of the fourth step
            over.wait(60)

    server.before = before
    torn = run(killed)
    try:
        torn.until(lambda: has_logged(killed, 3))
        torn.send(signal.SIGKILL)
        torn.wait()
    finally:
        over.set()
    assert newest_step(killed) == 2
    server.before = lambda body: None
    again = run(killed, "--resume")
    assert again.wait() == 0, again.output
    the_same(whole, killed)


def the_same(one: Path, other: Path) -> None:
    """Logs and final weights, to the bit."""
    assert learned(one) == learned(other)
    names = [path.relative_to(one) for path in (one / "final_model").rglob("*.safetensors")]
    assert len(names) == 2
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_a_signal_while_a_step_is_grown_saves_the_step_before(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, strategy: str | None
) -> None:
    """The run continues as one does that saved at that step: with trees of the newest weights.
    Of two processes the second is sent the signal."""
    server.repeats = True
    numbers, growing, over = itertools.count(), threading.Event(), threading.Event()

    def run(name: str, save_steps: int, *more: str) -> list[Process]:
        keys = OVERLAPPED | {"max_steps": 4, "save_steps": save_steps}
        arguments = asked("magrpo", tmp_path / name, server.url, **keys)
        arguments.append("generation.overlap=1")
        if strategy is None:
            return [zygote.run("magrpo", [*arguments, *more])]
        arguments.append(f"distributed.strategy={strategy}")
        return zygote.run_team(2, "magrpo", [*arguments, *more])

    whole = run("whole", 2)
    assert not any(ended(whole)), whole[0].output

    def before(body: dict) -> None:
        if body["model"] != "base" and next(numbers) >= 2 * 2 * A_STEP:  # of the third step
            growing.set()
            over.wait(250)

    server.before = before
    stopped = run("stopped", 0)
    try:
        stopped[0].until(growing.is_set)
        stopped[-1].send(signal.SIGTERM)
        # Nobody waits for the third step's trees.
        codes = [process.wait(200) for process in stopped]
    finally:
        over.set()
    output = "".join(process.output for process in stopped)
    assert set(codes) == {128 + signal.SIGTERM}, output
    assert "Traceback" not in output and "error: " not in output
    assert newest_step(tmp_path / "stopped") == len(lines(tmp_path / "stopped")) == 2
    server.before = lambda body: None
    again = run("stopped", 0, "--resume")
    assert not any(ended(again)), again[0].output
    the_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_ratios_of_steps_before_a_checkpoint_are_in_the_record_after_it(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """The record of step 4 is of steps 3 and 4, and the checkpoint of step 3."""
    server.repeats = True

    def run(name: str, *more: str) -> None:
        keys = OVERLAPPED | {"max_steps": 4, "save_steps": 3, "logging_steps": 2}
        arguments = asked("magrpo", tmp_path / name, server.url, **keys)
        zygote.finish("magrpo", [*arguments, "generation.overlap=1", *more])

    run("whole")
    run("again")
    folder = tmp_path / "again"
    assert newest_step(folder) == 4
    shutil.rmtree(folder / "checkpoints" / "step_000004")  # as if killed before
    assert newest_step(folder) == 3
    run("again", "--resume")
    the_same(tmp_path / "whole", folder)
    assert len(ratios(folder)) == 2 and ratios(folder)[1] != pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_calls_of_a_step_that_is_grown_ahead_are_not_yet_counted(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """Each step asks an expert, who is not there, about two attempts."""
    folder, port = tmp_path / "run", free_port()
    keys = OVERLAPPED | {"max_steps": 3, "save_steps": 0, "max_new_tokens": 6}
    zygote.finish(
        "magrpo",
        [*asked("magrpo", folder, server.url, **keys), "generation.overlap=1",
         "magrpo.early_termination_threshold=null", "external.mode=expert_edits",
         "external.on_error=plain", "external.expert_model=tiny",
         f"external.expert_base_url=http://127.0.0.1:{port}/v1"],
    )  # fmt: skip
    assert [line["metrics"]["expert_fallbacks"] for line in lines(folder)] == [2, 4, 6]


@pytest.mark.slow
def test_what_goes_wrong_while_a_step_updates_stops_the_run_behind_it(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """The run then continues with a step that is sampled anew."""
    folder, numbers = tmp_path / "run", itertools.count()

    def before(body: dict) -> None:
        if body["model"] != "base" and next(numbers) >= A_STEP:
            raise HTTPException(400, "out of luck")

    server.before = before
    keys = LEARNING | {"max_steps": 3, "save_steps": 0}
    arguments = [*asked("magrpo", folder, server.url, **keys), "generation.overlap=1"]
    run = zygote.finish("magrpo", arguments, code=1)
    endings = [x for x in run.output.splitlines() if x.startswith(("error: ", "interrupted: "))]
    assert "answers HTTP 400: " in endings[0] and "out of luck" in endings[0]
    assert endings[1].startswith("interrupted: saved ") and "Traceback" not in run.output
    assert newest_step(folder) == len(lines(folder)) == 1
    server.before = lambda body: None
    server.asked.clear()
    zygote.finish("magrpo", [*arguments, "--resume"])
    assert [line["update"] for line in lines(folder)] == [1, 2, 3]
    assert ratios(folder)[:2] == pytest.approx([1, 1], abs=1e-3)
    models = [body["model"] for body in server.asked if body["model"].startswith("agent_0")]
    assert len(models) == 4 and len(set(models)) == 1  # steps 2 and 3, both by what was saved


def test_a_server_that_is_not_there_is_reported_at_once(zygote: Zygote, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    run = zygote.finish("magrpo", asked("magrpo", tmp_path / "run", url), code=2)
    assert run.error.startswith(f"generation.vllm_url: '{url}' cannot be reached (")
    assert "Loading weights" not in run.output


@pytest.mark.slow
def test_a_server_lost_in_the_middle(zygote: Zygote, server: FakeVLLM, tmp_path: Path) -> None:
    """The run saves what it has done, though no checkpoint was due, and continues from there."""
    folder = tmp_path / "run"
    keys = {"save_steps": 0, "eval_interval": 0, "patience": 5}
    run = zygote.run("magrpo", asked("magrpo", folder, server.url, max_steps=1000, **keys))
    run.until(has_trained(folder))
    server.stop()
    assert run.wait() == 1, run.output
    assert "Traceback" not in run.output
    step = newest_step(folder)
    assert step == len(lines(folder)) > 0
    endings = [x for x in run.output.splitlines() if x.startswith(("error: ", "interrupted: "))]
    assert endings[0].startswith("error: generation.vllm_url: ")
    assert "no better for 5 s" in endings[0]
    assert endings[1].startswith("interrupted: saved ") and endings[1].endswith("--resume")
    server.start()
    zygote.finish(
        "magrpo", [*asked("magrpo", folder, server.url, max_steps=step + 2, **keys), "--resume"]
    )
    assert [line["update"] for line in lines(folder)] == list(range(1, step + 3))
    assert ratios(folder) == pytest.approx([1] * (step + 2), abs=1e-3)


@pytest.mark.slow
def test_a_signal_while_the_server_is_away(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """The run saves at once: who has sent the signal would kill it before the server is given
    up."""
    folder = tmp_path / "run"
    keys = {"save_steps": 0, "eval_interval": 0, "patience": 3600}
    run = zygote.run("magrpo", asked("magrpo", folder, server.url, max_steps=1000, **keys))
    run.until(has_trained(folder))
    server.stop()
    step = -1
    while len(lines(folder)) != step:  # until it waits for the server
        step = len(lines(folder))
        threading.Event().wait(5)
    run.send(signal.SIGTERM)
    assert run.wait(200) == 1, run.output
    assert "Traceback" not in run.output and "and the run was asked to end" in run.output
    assert "interrupted: saved " in run.output
    assert newest_step(folder) == len(lines(folder)) == step


@pytest.mark.slow
def test_several_servers_of_several_models(zygote: Zygote, tmp_path: Path) -> None:
    """One of an agent's two servers dies in the middle, and the run continues; top-p truncates, and
    all weigh 1."""
    folder = tmp_path / "run"
    fakes = [fake_server() for _ in range(3)]
    for fake in fakes:
        fake.replays = True
    keys = LEARNING | {"max_steps": 4, "save_steps": 0, "num_turns": 2, "top_p": 0.9}
    arguments = [
        *asked("magrpo", folder, "", **keys), "agents=[builtin:tiny-coder,builtin:tiny-coder]",
        f"generation.vllm_url={{aux: [{fakes[0].url}, {fakes[1].url}], main: {fakes[2].url}}}",
    ]  # fmt: skip
    death = threading.Thread(target=fakes[0].stop)
    numbers = itertools.count()

    def before(body: dict) -> None:
        if body["model"] != "base" and next(numbers) == 0:
            death.start()

    fakes[0].before = before
    run = zygote.run("magrpo", arguments)
    try:
        assert run.wait() == 0, run.output
        death.join()
    finally:
        for fake in fakes:
            fake.stop()
    assert run.output.count("it is left out until it answers, 1 of 2 servers continue") == 1
    assert ratios(folder) == pytest.approx([1] * 4, abs=1e-3)
    agents = [{name.split("-")[0] for _, name in fake.events} for fake in fakes]
    assert agents == [{"agent_0"}, {"agent_0"}, {"agent_1"}]
    assert fakes[1].adapters == fakes[2].adapters == {}
    assert any("sampling_params" in body for body in fakes[1].asked)


def test_servers_that_a_run_starts_end_with_it(zygote: Zygote, tmp_path: Path) -> None:
    """Where it is killed, where a signal stops it, and at its end; ``--resume`` starts others."""
    folder, file = tmp_path / "run", tmp_path / "pids"
    command = f"cd {ROOT}; {sys.executable} -m tests.support.vllm_server {{port}} {file} {{model}}"
    keys = {"save_steps": 1, "eval_interval": 0, "max_new_tokens": 6}
    arguments = [
        *asked("magrpo", folder, "null", max_steps=100_000, **keys),
        f"generation.vllm_command='{command}'",
    ]

    def pids() -> list[int]:
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    run = zygote.run("magrpo", arguments)
    run.until(lambda: newest_step(folder) >= 1)
    assert is_running(pids()[0])
    run.send(signal.SIGKILL)  # to it alone
    run.until(lambda: not is_running(pids()[0]), 60)
    run = zygote.run("magrpo", [*arguments, "--resume"])
    step = newest_step(folder)
    run.until(lambda: newest_step(folder) > step)
    run.send(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.output
    assert not is_running(pids()[1])
    step = newest_step(folder)
    zygote.finish("magrpo", [*arguments, f"magrpo.max_steps={step + 1}", "--resume"])
    assert len(pids()) == 3 and not is_running(pids()[2])
    assert [line["update"] for line in lines(folder)] == list(range(1, step + 2))
    assert "vllm_url: null" in (folder / "config.yaml").read_text()


def test_a_server_that_cannot_be_started_is_reported_in_a_line(
    zygote: Zygote, tmp_path: Path
) -> None:
    arguments = asked("magrpo", tmp_path / "run", "null")
    arguments.append("generation.vllm_command='no-such-program {port}'")
    run = zygote.finish("magrpo", arguments, code=2)
    assert run.error.startswith("generation.vllm_command: ")
    assert "Loading weights" not in run.output


def ended(team: list[Process]) -> list[int]:
    return [process.wait() for process in team]


@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_processes_share_the_adapters(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, overlap: int
) -> None:
    """With ``overlap`` the weights after the first of two updates are sampled from by nobody."""
    folder = tmp_path / "run"
    arguments = asked(
        "magrpo", folder, server.url, batch_size=3, max_steps=2, save_steps=0, max_new_tokens=24
    )
    arguments.append(f"generation.overlap={overlap}")
    zygote.finish_team(2, "magrpo", arguments)
    assert_in_sync(folder, 2)
    loads = Counter(name for what, name in server.events if what == "load")
    assert set(loads.values()) == {1} and len(loads) == 2 * (3 - overlap)
    assert ratios(folder)[: 2 - overlap] == pytest.approx([1] * (2 - overlap), abs=1e-3)
    assert server.adapters == {} and not (folder / "vllm").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "fsdp"])
def test_processes_grow_the_trees_that_one_would(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, strategy: str
) -> None:
    """Of a server that repeats itself; sums are rounded differently."""
    server.repeats = True
    keys = OVERLAPPED | {"save_steps": 0, "max_steps": 3}
    zygote.finish(
        "magrpo",
        [*asked("magrpo", tmp_path / "one", server.url, **keys), "generation.overlap=1"],
    )
    arguments = asked("magrpo", tmp_path / "two", server.url, **keys)
    arguments += [f"distributed.strategy={strategy}", "generation.overlap=1"]
    zygote.finish_team(2, "magrpo", arguments)
    # Later steps are drawn by weights whose last bits differ, which this server's draws depend on.
    first, other = learned(tmp_path / "one")[:2], learned(tmp_path / "two")[:2]
    for own, wanted in zip(other, first, strict=True):
        assert own["reward_mean"] == wanted["reward_mean"]
        assert own == pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)


def test_split_models_train_as_whole_ones(zygote: Zygote, server: FakeVLLM, tmp_path: Path) -> None:
    """Three tasks of two processes: unlike numbers of passes. Sums are rounded differently."""
    server.repeats = True
    keys = LEARNING | {"max_steps": 2, "save_steps": 1, "batch_size": 3, "kl_coef": 0.1}
    zygote.finish("magrpo", asked("magrpo", tmp_path / "one", server.url, **keys))
    folder = tmp_path / "two"
    arguments = [*asked("magrpo", folder, server.url, **keys), "distributed.strategy=fsdp"]
    zygote.finish_team(2, "magrpo", arguments)
    assert_in_sync(folder, 2)
    first, other = learned(tmp_path / "one")[0], learned(folder)[0]
    assert other == pytest.approx(first, rel=1e-3, abs=1e-5, nan_ok=True)
    assert ratios(folder) == pytest.approx([1, 1], abs=1e-4)
    loads = Counter(name for what, name in server.events if what == "load")
    assert set(loads.values()) == {1} and len(loads) == 2 * 4


@pytest.mark.slow
def test_split_models_are_evaluated_while_a_step_is_grown_ahead(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """As one process does it: before, between and after the steps."""
    server.repeats = True
    keys = OVERLAPPED | {"max_steps": 3, "save_steps": 0, "eval_interval": 1}
    arguments = ["generation.overlap=1"]
    zygote.finish("magrpo", [*asked("magrpo", tmp_path / "one", server.url, **keys), *arguments])
    arguments += ["distributed.strategy=fsdp"]
    asking = asked("magrpo", tmp_path / "two", server.url, **keys)
    zygote.finish_team(2, "magrpo", [*asking, *arguments])
    assert_in_sync(tmp_path / "two", 2)
    evaluated = [lines(tmp_path / name, "eval") for name in ("one", "two")]
    assert [len(found) for found in evaluated] == [4, 4]
    first, other = (found[0]["metrics"] for found in evaluated)  # later ones: weights' last bits
    assert other["reward_mean"] == pytest.approx(first["reward_mean"])
    assert ratios(tmp_path / "two")[0] == pytest.approx(1, abs=1e-3)
    assert server.adapters == {} and not (tmp_path / "two" / "vllm").exists()


@pytest.mark.slow
def test_a_server_that_does_not_fit_ends_all_processes(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path
) -> None:
    """It refuses the adapters of the first process, for which the others wait."""
    server.max_rank = 2
    arguments = [*asked("magrpo", tmp_path / "run", server.url), "distributed.strategy=fsdp"]
    team = zygote.finish_team(2, "magrpo", arguments, code=2)
    together = team[0].output + team[1].output
    assert together.count("error: ") == 1 and "LoRA rank 4 is greater than 2" in together


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "fsdp"])
def test_processes_whose_server_is_lost(
    zygote: Zygote, server: FakeVLLM, tmp_path: Path, strategy: str
) -> None:
    """The last whole step is saved, split models by all processes together."""
    folder = tmp_path / "run"
    keys = {"save_steps": 0, "eval_interval": 0, "max_steps": 1000, "patience": 5}
    arguments = asked("magrpo", folder, server.url, **keys)
    team = zygote.run_team(2, "magrpo", [*arguments, f"distributed.strategy={strategy}"])
    team[0].until(has_trained(folder))
    server.stop()
    assert ended(team) == [1, 1]
    assert newest_step(folder) == len(lines(folder)) > 0
    together = team[0].output + team[1].output
    assert together.count("error: ") == 1 and "interrupted: saved" in team[0].output
