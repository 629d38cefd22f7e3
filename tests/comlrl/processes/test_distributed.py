"""Several processes: real gloo groups, each process a fork that torchrun might have started."""

from __future__ import annotations

import contextlib
import functools
import json
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
from safetensors.torch import load_file, save_file

from tests.support import loops, tiny_models
from tests.support.runs import (
    ALGORITHMS,
    CLOCK,
    ROOT,
    Process,
    Zygote,
    assert_same,
    metrics,
    newest_step,
    small,
    small_of,
    state,
    weights,
)

HERE = str(Path(__file__))


def together(zygote: Zygote, size: int, function: str, *arguments: Any) -> None:
    """Run a function of this file in ``size`` processes."""
    team = zygote.team(size, {"call": [HERE, function, list(arguments)]})
    codes = [process.wait() for process in team]
    assert not any(codes), "\n".join(process.output for process in team)


# The seam


def check_seam() -> None:
    from comlrl.processes import distributed

    distributed.start()
    size, rank = distributed.world_size(), distributed.rank()
    items = list(range(7))
    own = distributed.shard(items)
    assert own == items[rank::size]
    assert distributed.gather(own) == items
    assert distributed.gather(distributed.shard(items[:1])) == items[:1]
    assert distributed.all_gather(rank) == list(range(size))
    assert distributed.from_main(lambda: ("made by", rank)) == ("made by", 0)
    assert distributed.total(rank + 1) == size * (size + 1) / 2
    assert distributed.all_reduce_counts({"a": rank, "b": 1})["b"] == size
    # Item i comes to i pieces: i = 0 … 6 stand at 0, 0, 1, 3, 6, 10, 15, in all 21.
    places, whole = distributed.shard_positions(own)
    starts = [0, 0, 1, 3, 6, 10, 15]
    assert whole == 21
    assert places == [starts[i] + k for i in own for k in range(i)]
    check_gradients(rank, size)
    assert distributed.in_sync([torch.ones(3), torch.zeros(2, dtype=torch.bfloat16)])
    # One bit apart is apart; 0.0 and -0.0 are equal numbers and not equal bits.
    assert not distributed.in_sync([torch.tensor(0.0 if rank else -0.0)])
    distributed.stop()


def check_gradients(rank: int, size: int) -> None:
    from comlrl.processes import distributed

    a, b, c = (torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)) for _ in range(3))
    a.grad = torch.full_like(a, rank + 1.0)
    b.grad = torch.full_like(b, 5.0) if rank == size - 1 else None
    calls = []
    reduce = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda tensor: (calls.append(tensor.numel()), reduce(tensor))
    distributed.add_gradients([a, b, c])
    torch.distributed.all_reduce = reduce
    assert calls == [3 * 6 + 3]  # one flat call: three gradients and who has them
    assert a.grad is not None and a.grad.tolist() == [[size * (size + 1) / 2] * 3] * 2
    assert b.grad is not None and b.grad.tolist() == [[5.0] * 3] * 2
    assert c.grad is None  # nowhere: an optimizer is to skip it


@pytest.mark.parametrize("size", [2, 3])
def test_seam(zygote: Zygote, size: int) -> None:
    together(zygote, size, "check_seam")


# The update: K processes against one


def tiny_model() -> str:
    return str(tiny_models.folder("qwen2"))


def update(folder: str, model: str, tasks: int, algorithm: str, keys: dict[str, Any]) -> None:
    """Grow the trees of ``tasks`` tasks and update a team; rank 0 saves the weights."""
    from comlrl.models.loading import build_team
    from comlrl.processes import distributed
    from comlrl.rollout.grow import Rollout
    from comlrl.types import Sampling
    from tests.support.fakes import PROMPTS, FakeTransition, task
    from tests.support.tiny_trainers import Recorder
    from trainers.launch.wiring.assembly import build_critic_team, build_sampler
    from trainers.magrpo import MAGRPOTrainer
    from trainers.ppo import PPOTrainer
    from trainers.shppo import SHPPOTrainer

    distributed.start()
    if keys.get("critic_model"):
        keys = {**keys, "critic_model": model}
    config = tiny_models.config(
        algorithm, num_agents=2, num_turns=2, num_generations=3, batch_size=5, max_steps=2,
        num_train_epochs=None, early_termination_threshold=0.5, kl_coef=0.1, learning_rate=1e-2,
        agent_model__name=model, agent_model__torch_dtype="float64", **keys,
    )  # fmt: skip
    team, section = build_team(config), config.section
    sampling = Sampling(1.0, 16, section.top_p, max_support=2)
    sampler: Any = Bytes(team)
    if algorithm == "shppo":
        _, latent = build_sampler(config, team)
        latent.inner, sampler = sampler, latent
    rollout = Rollout(sampler, Length(), FakeTransition(), PROMPTS, seed=1)
    named, logger = [task(f"task_{i}") for i in range(tasks)], Recorder()
    loop = loops.loop(section, named, Path(folder), logger)
    trainer: Any
    if algorithm == "magrpo":
        trainer = MAGRPOTrainer(section, team, rollout, loop, sampling)
    elif algorithm == "ppo":
        critics = build_critic_team(config, team)
        trainer = PPOTrainer(section, team, rollout, loop, sampling, critic_team=critics)
    else:
        trainer = SHPPOTrainer(section, team, sampler.policy, rollout, loop, sampling)
    trainer.train()
    flat = {
        f"{component}/{name}": tensor
        for component, tensors in state(trainer).items()
        for name, tensor in tensors.items()
    }
    assert distributed.in_sync(flat.values())
    if distributed.is_main():
        out = Path(folder) / f"{distributed.world_size()}"
        save_file(flat, f"{out}.safetensors")
        results = [
            {k: v for k, v in m.items() if not any(c in k for c in CLOCK)} for m in logger.metrics()
        ]
        out.with_suffix(".json").write_text(json.dumps(results))
    distributed.stop()


class Bytes:
    """Samples keyed bytes, of keyed lengths: the same trees for any number of processes."""

    def __init__(self, team: Any) -> None:
        self.team = team

    def encode(self, agent: int, prompt: Any) -> tuple[int, ...]:
        return tuple(self.team.of(agent).encode(prompt))[-60:]

    def fits(self, prompt_ids: Any, sampling: Any) -> bool:
        return True

    def sample(self, requests_N: Any, sampling: Any) -> Any:
        from comlrl.keyed import uniforms
        from comlrl.types import Completion

        def one(key: Any) -> Completion:
            draws = uniforms(key, 17)
            ids = tuple(int(97 + 26 * u) for u in draws[: 3 + int(13 * draws[16])])
            text = "".join(map(chr, ids))
            kept = self.sets(ids) if sampling.truncates else None
            return Completion(text, ids, True, -len(ids) * float(draws[0]), support=kept)

        return [[tuple(map(one, r.keys_G)) for r in requests] for requests in requests_N]

    @staticmethod
    def sets(ids: tuple[int, ...]) -> Any:
        """In turn a letter or two beside the sampled one, and a threshold."""
        from comlrl.types import SamplingSupport

        counts = torch.tensor([at % 3 for at in range(len(ids))], dtype=torch.int32)
        threshold = torch.where(counts == 0, -7.0, torch.inf)
        others = [97 + (token + at) % 26 for token in ids for at in range(2)]
        return SamplingSupport(
            counts, torch.tensor(others[: int(counts.sum())], dtype=torch.int32), threshold
        )


class Length:
    """Between 0 and 1, so that some trees end early and counts are uneven."""

    def score(self, actions: Any) -> Any:
        from comlrl.types import Score

        return [Score((sum(map(len, a.completions_N)) % 10) / 10) for a in actions]

    def close(self) -> None: ...


PARTS = {"train_batch_size": 4}
TURNS = {"granularity": "turn", "ppo_epochs": 2, "train_batch_size": 4}
UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "magrpo": ("magrpo", {}),
    "magrpo in parts": ("magrpo", PARTS),
    "magrpo, two passes": ("magrpo", PARTS | {"update_epochs": 2}),
    "magrpo, truncated": ("magrpo", PARTS | {"update_epochs": 2, "top_p": 0.9}),
    "magrpo in order": ("magrpo", PARTS | {"update_epochs": 2, "turn_order": "sequential"}),
    "ippo": ("ppo", PARTS | {"ppo_epochs": 2}),
    "ippo by turns": ("ppo", TURNS | {"kl_in": "loss"}),
    "mappo by a model": ("ppo", TURNS | {"critic": "centralized", "critic_model": True}),
    "shared mappo": ("ppo", TURNS | {"critic": "centralized", "shared_policy": True}),
    "shppo": ("shppo", PARTS | {"ppo_epochs": 3}),
    "shppo, latents as a policy": ("shppo", PARTS | {"ppo_epochs": 3, "latent_gradient": "policy"}),
    "shppo, latents at random": ("shppo", PARTS | {"ppo_epochs": 2, "latents": "sampled"}),
}


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where lies what one process comes to, for each of ``UPDATES``."""

    @functools.cache
    def folder(name: str) -> Path:
        made = tmp_path_factory.mktemp("alone")
        together(zygote, 1, "update", str(made), tiny_model(), 5, *UPDATES[name])
        return made

    return folder


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", UPDATES)
def test_k_processes_update_as_one(
    zygote: Zygote, alone: Callable[[str], Path], size: int, name: str
) -> None:
    """Five tasks over 2 or 3 processes, trees of uneven size, over two steps of every agent."""
    folder = alone(name)
    together(zygote, size, "update", str(folder), tiny_model(), 5, *UPDATES[name])
    one, many = (load_file(f"{folder}/{n}.safetensors") for n in (1, size))
    assert one.keys() == many.keys()
    near = (1e-3, 1e-5) if name.startswith("shppo") else (1e-5, 1e-7)  # its networks are float32
    for tensor in one:
        torch.testing.assert_close(many[tensor], one[tensor], rtol=near[0], atol=near[1])
    logs = [json.loads(Path(f"{folder}/{n}.json").read_text()) for n in (1, size)]
    assert len(logs[0]) == len(logs[1]) == 2
    for before, after in zip(*logs, strict=True):
        assert before.keys() == after.keys()
        for metric, value in before.items():
            assert after[metric] == pytest.approx(value, rel=1e-4, abs=near[1]), metric
    assert logs[0][0]["tasks"] == 5 and logs[0][0]["gradient_norm"] > 0
    assert logs[0][1].get("ratio_max", 2.0) > 1


@pytest.mark.parametrize(
    "name",
    ["magrpo, two passes", "ippo", "mappo by a model", "shppo", "shppo, latents as a policy"],
)
def test_more_processes_than_tasks(zygote: Zygote, tmp_path: Path, name: str) -> None:
    """The third process has nothing to grow and takes part all the same."""
    for size in (1, 3):
        together(zygote, size, "update", str(tmp_path), tiny_model(), 2, *UPDATES[name])
    one, many = (load_file(str(tmp_path / f"{n}.safetensors")) for n in (1, 3))
    near = (1e-3, 1e-5) if name.startswith("shppo") else (1e-5, 1e-7)  # its networks are float32
    for tensor in one:
        torch.testing.assert_close(many[tensor], one[tensor], rtol=near[0], atol=near[1])


# Whole runs


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
    run = zygote.run("magrpo", three_tasks(folder))
    assert run.wait() == 0, run.output
    return folder


def test_a_run_of_two_processes(zygote: Zygote, tmp_path: Path, lone: Path) -> None:
    """One directory, each line once, weights alike, and the numbers of one process. Killed after
    its first step and resumed by two, it ends bit-equal."""
    folder, killed = tmp_path / "two", tmp_path / "killed"
    team = zygote.team(2, {"run": ["magrpo", three_tasks(folder)]})
    assert ended(team) == [0, 0], team[0].output + team[1].output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["distributed"] == {"world_size": 2, "weights_in_sync": True}
    assert "done:" in team[0].output and "done:" not in team[1].output
    assert "train 1/2" not in team[1].output
    one, two = metrics(lone), metrics(folder)
    assert [{**line, "metrics": 0} for line in one] == [{**line, "metrics": 0} for line in two]
    for name in ("reward_mean", "entropy", "loss", "gradient_norm", "completion_length_mean"):
        assert two[1]["metrics"][name] == pytest.approx(one[1]["metrics"][name], rel=1e-3), name
    team = zygote.team(2, {"run": ["magrpo", three_tasks(killed)]})
    team[0].until(lambda: newest_step(killed) >= 1)
    for process in team:
        process.kill()
    ended(team)
    team = zygote.team(2, {"run": ["magrpo", [*three_tasks(killed), "--resume"]]})
    assert ended(team) == [0, 0], team[0].output + team[1].output
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
    team = zygote.team(3, {"run": [algorithm, [*small_of(algorithm, folder), *two_tasks]]})
    assert ended(team) == [0, 0, 0], "\n".join(process.output for process in team)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["distributed"] == {"world_size": 3, "weights_in_sync": True}
    assert metrics(folder)[-1]["update"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_with_two_processes(zygote: Zygote, tmp_path: Path, algorithm: str) -> None:
    """Line by line the numbers of one process, up to rounding; weights alike at the end."""
    lone, folder = tmp_path / "one", tmp_path / "two"
    more = [f"{algorithm}.batch_size=3", f"{algorithm}.max_steps=2"]
    more.append("agent_model.torch_dtype=float32")  # rounding is to be small
    run = zygote.run(algorithm, [*small_of(algorithm, lone), *more])
    assert run.wait() == 0, run.output
    team = zygote.team(2, {"run": [algorithm, [*small_of(algorithm, folder), *more]]})
    assert ended(team, 250) == [0, 0], team[0].output + team[1].output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["distributed"] == {"world_size": 2, "weights_in_sync": True}
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
    team = zygote.team(2, {"run": ["magrpo", arguments]})
    team[0].until(lambda: newest_step(folder) >= 2)
    for process in team:
        process.kill()
    ended(team)
    run = zygote.run("magrpo", [*arguments, "--resume"])
    assert run.wait() == 0, run.output
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert weights(folder)["optimizer_0/updates"] == 4


def test_mistakes_are_reported_once(zygote: Zygote, tmp_path: Path) -> None:
    """In the configuration, in the data, and in the models: exit code 2 on every process."""
    for mistake in ("magrpo.learning_rat=1", "dataset.train_split=nowhere", "agent_model.name=/no"):
        arguments = [*small("magrpo", tmp_path / "run"), mistake]
        team = zygote.team(2, {"run": ["magrpo", arguments]})
        assert ended(team, 60) == [2, 2], team[0].output + team[1].output
        output = team[0].output + team[1].output
        assert output.count("error: ") == 1 and "Traceback" not in output, output


def test_a_signal_to_one_process_stops_all(zygote: Zygote, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = small("magrpo", folder, max_steps=200, save_steps=0, eval_interval=0)
    team = zygote.team(2, {"run": ["magrpo", arguments]})
    log = folder / "metrics.jsonl"
    team[0].until(lambda: log.exists() and bool(log.read_text()))
    team[1].send(signal.SIGTERM)
    assert ended(team) == [143, 143], team[0].output + team[1].output
    assert newest_step(folder) == len(metrics(folder)) > 0
    assert "saved" in team[0].output


# Sharded models


def check_sharding(model: str) -> None:
    """Half of each layer here, and the whole of what is stored; one share, which counts once."""
    from comlrl.models.loading import build_team
    from comlrl.processes import distributed
    from comlrl.processes.statistics import Sums

    distributed.start("fsdp")
    assert Sums(loss=2.0).all_reduced().of["loss"] == distributed.total(2.0) == 2.0
    config = tiny_models.config(agent_model__name=model, agent_model__torch_dtype="float32")
    team = build_team(config)
    expected = state(team)["agent_1"]
    team.split()
    weight = team.agents[0].model.model.layers[0].mlp.up_proj.base_layer.weight
    assert weight.shape == (48, 32) and weight.to_local().shape == (24, 32)
    adapter = team.agents[1].parameters()
    assert all(p.to_local().numel() * 2 == p.numel() for p in adapter)
    again = state(team)["agent_1"]
    assert not [name for name, value in expected.items() if not torch.equal(again[name], value)]
    torch.manual_seed(0)  # alike in all processes
    other = {name: torch.randn_like(value) for name, value in expected.items()}
    team.load_tensors({"agent_0": expected, "agent_1": other})
    again = state(team)["agent_1"]
    assert not [name for name, value in other.items() if not torch.equal(again[name], value)]
    distributed.stop()


def test_layers_are_split_and_stored_whole(zygote: Zygote) -> None:
    together(zygote, 2, "check_sharding", tiny_model())


def run_sharded(zygote: Zygote, tmp_path: Path, algorithm: str, *more: str) -> tuple[Path, Path]:
    """A run of one process and the same run sharded over two; (one, two)."""
    lone, folder = tmp_path / "one", tmp_path / "two"
    common = ["agent_model.torch_dtype=float32", *more]
    run = zygote.run(algorithm, [*small_of(algorithm, lone), *common])
    arguments = [*small_of(algorithm, folder), *common, "distributed.strategy=fsdp"]
    team = zygote.team(2, {"run": [algorithm, arguments]})
    assert ended(team, 250) == [0, 0], team[0].output + team[1].output
    assert run.wait() == 0, run.output
    assert_sharded(lone, folder)
    return lone, folder


def assert_sharded(lone: Path, folder: Path) -> None:
    """That a run's numbers are those of one process. Where the policy is still its own reference,
    MADPO's margins are rounding, and so is their sign, of which the accuracy is the share."""
    for before, after in zip(metrics(lone), metrics(folder), strict=True):
        for name, value in before["metrics"].items():
            margin = before["metrics"].get(name.replace("dpo/accuracy", "dpo/margin"))
            if name.endswith("dpo/accuracy") and abs(margin) < 1e-5:
                continue
            expected = value if value is None else pytest.approx(value, rel=1e-2, abs=1e-4)
            assert after["metrics"][name] == expected, name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["distributed"] == {"world_size": 2, "weights_in_sync": True}


def test_sharded_run(zygote: Zygote, tmp_path: Path, lone: Path) -> None:
    """The numbers and the files of one process; and one process resumes from them."""
    folder = tmp_path / "two"
    arguments = [*three_tasks(folder), "distributed.strategy=fsdp"]
    team = zygote.team(2, {"run": ["magrpo", arguments]})
    assert ended(team) == [0, 0], team[0].output + team[1].output
    assert_sharded(lone, folder)
    one, two = weights(lone), weights(folder)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=1e-4)
    for agent in ("agent_0", "agent_1"):
        files = [f / "final_model" / agent / "adapter_model.safetensors" for f in (lone, folder)]
        before, after = (load_file(str(file)) for file in files)
        assert before.keys() == after.keys()
        assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
        assert (files[1].parent / "adapter_config.json").exists()
    run = zygote.run("magrpo", [*three_tasks(folder, max_steps=3), "--resume"])
    assert run.wait() == 0, run.output
    updates = [line["update"] for line in metrics(folder) if line["phase"] == "train"]
    assert updates == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("magrpo", ["lora.enabled=false", "magrpo.kl_coef=0.1", "magrpo.learning_rate=1e-4"]),
        ("magrpo", ["magrpo.num_turns=2", "magrpo.handoff=random"]),
        ("ppo", ["ppo.kl_coef=0.1"]),
        ("shppo", []),
        ("madpo", ["madpo.dpo_reference=start"]),
    ],
)
def test_sharded_runs_of_others(
    zygote: Zygote, tmp_path: Path, algorithm: str, keys: list[str]
) -> None:
    lone, folder = run_sharded(zygote, tmp_path, algorithm, *keys)
    one, two = weights(lone), weights(folder)
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in two.items()}


def test_sharding_that_cannot_be(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.run("magrpo", [*small("magrpo", tmp_path / "run"), "distributed.strategy=fsdp"])
    assert run.wait() == 2
    assert "error: distributed.strategy: 'fsdp'" in run.output


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
    run = torchrun(2, small("magrpo", folder, max_steps=500, eval_interval=0))
    while newest_step(folder) < 2:
        assert run.poll() is None
        time.sleep(0.1)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = run.communicate(timeout=300)
    assert run.returncode != 0
    assert "SIGKILL" in output or "Signal 9" in output, output
    step = newest_step(folder)
    arguments = small("magrpo", folder, max_steps=step + 1, eval_interval=0)
    again = torchrun(2, [*arguments, "--resume"])
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert [line["update"] for line in metrics(folder)] == list(range(1, step + 2))
