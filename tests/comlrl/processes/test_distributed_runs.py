"""Whole runs in several processes: real gloo groups, killed, resumed, sharded, by torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny_models
from tests.support.processes import children
from tests.support.runs import (
    ALGORITHMS,
    ROOT,
    Process,
    Zygote,
    assert_in_sync,
    assert_same,
    metrics,
    newest_step,
    small,
    small_of,
    state,
    together,
    weights,
)


def ended(team: list[Process], seconds: float = 300) -> list[int]:
    return [process.wait(seconds) for process in team]


def three_tasks(folder: Path, **keys: Any) -> list[str]:
    """Arguments of a run of two steps. bfloat16's rounding depends on the batch: none of it."""
    keys = {"batch_size": 3, "max_steps": 2, "eval_num_samples": 3} | keys
    return [*small("magrpo", folder, **keys), "agent_model.torch_dtype=float32"]


@pytest.fixture(scope="module")
def lone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``three_tasks`` by one process."""
    folder = tmp_path_factory.mktemp("lone") / "run"
    zygote.finish("magrpo", three_tasks(folder))
    return folder


def test_a_run_of_two_processes(zygote: Zygote, tmp_path: Path, lone: Path) -> None:
    """One directory, each line once, weights alike, and the numbers of one process. Killed after
    its first step and resumed by two, it ends bit-equal."""
    folder, killed = tmp_path / "two", tmp_path / "killed"
    team = zygote.finish_team(2, "magrpo", three_tasks(folder))
    assert_in_sync(folder, 2)
    assert "done:" in team[0].output and "done:" not in team[1].output
    assert "train 1/2" not in team[1].output
    one, two = metrics(lone), metrics(folder)
    assert [{**line, "metrics": 0} for line in one] == [{**line, "metrics": 0} for line in two]
    for name in ("reward_mean", "entropy", "loss", "gradient_norm", "completion_length_mean"):
        assert two[1]["metrics"][name] == pytest.approx(one[1]["metrics"][name], rel=1e-3), name
    zygote.kill_and_resume("magrpo", three_tasks(killed), killed, size=2)
    assert_same(killed, folder)


@pytest.mark.parametrize("algorithm", ["madpo", "marlhf"])
def test_whole_runs_with_more_processes_than_tasks(
    zygote: Zygote, tmp_path: Path, algorithm: str
) -> None:
    """Two tasks, of which the third process labels, fits and grows nothing."""
    two_tasks = ["dataset.train_split=train[:2]", "agent_model.torch_dtype=float32"]
    keys = {"max_steps": 2, "eval_interval": 0, "num_iterations": 1, "round_tasks": 2}
    two_tasks += [f"{algorithm}.{name}={value}" for name, value in keys.items()]
    folder = tmp_path / "run"
    zygote.finish_team(3, algorithm, [*small_of(algorithm, folder), *two_tasks])
    assert_in_sync(folder, 3)
    assert metrics(folder)[-1]["update"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_with_two_processes(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    """Line by line the numbers of one process, up to rounding; weights alike at the end."""
    lone, folder = tmp_path / "one", tmp_path / "two"
    more = [f"{algorithm}.batch_size=3", f"{algorithm}.max_steps=2"]
    more.append("agent_model.torch_dtype=float32")  # rounding is to be small
    zygote.finish(algorithm, [*small_of(algorithm, lone), *more])
    zygote.finish_team(2, algorithm, [*small_of(algorithm, folder), *more])
    assert_in_sync(folder, 2)
    one, two = metrics(lone), metrics(folder)
    assert [{**line, "metrics": 0} for line in one] == [{**line, "metrics": 0} for line in two]
    if algorithm == "marlhf":  # data-parallel, TRL's trainer fills the reward model's last batch
        return
    for before, after in zip(one, two, strict=True):
        assert before["metrics"].keys() == after["metrics"].keys()
        for name, value in before["metrics"].items():
            expected = value if value is None else pytest.approx(value, rel=1e-2, abs=1e-4)
            assert after["metrics"][name] == expected, name


def test_resuming_with_another_number_of_processes(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = small("magrpo", folder, eval_interval=0)
    team = zygote.run_team(2, "magrpo", arguments)
    team[0].until(lambda: newest_step(folder) >= 2)
    for process in team:
        process.kill()
    ended(team)
    zygote.finish("magrpo", [*arguments, "--resume"])
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert weights(folder)["optimizer_0/updates"] == 4


def test_mistakes_are_reported_once(zygote: Zygote, tmp_path: Path) -> None:
    """In the configuration, in the data, and in the models: exit code 2 on every process."""
    for mistake in ("magrpo.learning_rat=1", "dataset.train_split=nowhere", "agent_model.name=/no"):
        arguments = [*small("magrpo", tmp_path / "run"), mistake]
        team = zygote.finish_team(2, "magrpo", arguments, code=2)
        output = team[0].output + team[1].output
        assert output.count("error: ") == 1 and "Traceback" not in output, output


def test_a_signal_to_one_process_stops_all(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = small("magrpo", folder, max_steps=100_000, save_steps=0, eval_interval=0)
    team = zygote.run_team(2, "magrpo", arguments)
    log = folder / "metrics.jsonl"
    team[0].until(lambda: log.exists() and bool(log.read_text()))
    team[1].send(signal.SIGTERM)
    assert ended(team) == [143, 143], team[0].output + team[1].output
    assert newest_step(folder) == len(metrics(folder)) > 0
    assert "saved" in team[0].output


# Sharded models


def check_sharding(model: str, checkpointing: bool) -> None:
    """Gradients by shares of the rows, unlike in number, and passes that one process alone makes:
    all rows' gradients by whole models, in float64."""
    from comlrl.models.logprobs import action_logprobs
    from comlrl.models.pretrained import build_team
    from comlrl.processes import distributed
    from comlrl.processes.statistics import Sums
    from comlrl.types import Row, TokenBatch
    from comlrl.update.accumulate import accumulate, measure_all

    distributed.start()
    config = tiny_models.config(
        agent_model__name=model, agent_model__torch_dtype="float32",
        agent_model__gradient_checkpointing=checkpointing,
    )  # fmt: skip
    whole, split = build_team(config), build_team(config)
    torch.manual_seed(0)  # alike in all processes
    for agent, other in zip(whole.agents, split.agents, strict=True):
        agent.model.double()
        other.model.double()
        agent.fast = None  # it holds float32 copies
        for mine, same in zip(agent.parameters(), other.parameters(), strict=True):
            mine.data.copy_(torch.randn_like(mine) / 8)
            same.data.copy_(mine)
        agent.micro_batch_tokens = other.micro_batch_tokens = 8  # one row each
    expected = state(split)
    split.split()
    up = split.agents[0].model.model.layers[0].mlp.up_proj
    assert up.base_layer.weight.to_local().shape == (24, 32)
    assert not any(hasattr(p, "to_local") for p in split.agents[0].parameters())
    assert {p.shape for p in split.agents[0].parameters()} == {
        p.shape for p in whole.agents[0].parameters()
    }
    again = state(split)
    for name, tensors in expected.items():
        assert all(torch.equal(again[name][key], value) for key, value in tensors.items())
    rows = [
        Row((5 + i, 6, 7), ((8, 9 + i), (10, 11, 12 + i)), (1.0, 1.0), (2 * i, 2 * i + 1))
        for i in range(3)
    ]

    def learn(team: Any, index: int, rows: list[Row]) -> None:
        def loss(batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
            return action_logprobs(agent, batch, 0.9).logprob_A.sum(), Sums()

        with team.acting(index) as agent:
            accumulate(agent, rows, loss, Sums())

    rank = distributed.rank()
    for index, mine in ((0, rows[rank::2]), (1, rows if rank else [])):
        learn(split, index, mine)
        learn(whole, index, rows)
        if rank:
            with split.reference(index) as agent:
                measure_all(agent, rows, lambda batch: action_logprobs(agent, batch, 1.0) and None)
    for index in (0, 1):
        distributed.add_gradients(split.agents[index].parameters())
    for index in (0, 1):
        for name, parameter in whole.agents[index].named().items():
            gradient = split.agents[index].named()[name].grad
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)
            assert gradient.abs().max() > 0
    distributed.stop()


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [("qwen2", False), pytest.param("mistral", True, marks=pytest.mark.slow)],
)
def test_split_layers_have_the_gradients_of_whole_ones(
    zygote: Zygote, kind: str, checkpointing: bool
) -> None:
    folder = str(tiny_models.folder(kind))
    together(zygote, __file__, 2, "check_sharding", folder, checkpointing)


def test_sharding_that_cannot_be(zygote: Zygote, tmp_path: Path) -> None:
    """Of a single process, and where the built-in generator would sample."""
    arguments = [*small("magrpo", tmp_path / "run"), "distributed.strategy=fsdp"]
    run = zygote.finish("magrpo", arguments, code=2)
    assert "error: distributed.strategy: fsdp with generation.backend" in run.output


# torchrun itself


@pytest.fixture
def torchrun() -> Iterator[Callable[[int, list[str]], subprocess.Popen[str]]]:
    """Starts runs as a user would; whatever is left of them ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(size: int, arguments: list[str]) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
            str(size), str(ROOT / "train_magrpo.py"), *arguments,
        ]  # fmt: skip
        run = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        started.append(run)
        return run

    yield start
    for run in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_dies_brings_the_run_down(
    tmp_path: Path, torchrun: Callable[[int, list[str]], subprocess.Popen[str]]
) -> None:
    """With its error; and the run resumes."""
    folder = tmp_path / "run"
    run = torchrun(2, small("magrpo", folder, max_steps=100_000, eval_interval=0))
    while newest_step(folder) < 2:
        assert run.poll() is None
        time.sleep(0.1)
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    output, _ = run.communicate(timeout=300)
    assert run.returncode != 0
    assert "SIGKILL" in output or "Signal 9" in output, output
    step = newest_step(folder)
    arguments = small("magrpo", folder, max_steps=step + 1, eval_interval=0)
    again = torchrun(2, [*arguments, "--resume"])
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert [line["update"] for line in metrics(folder)] == list(range(1, step + 2))
