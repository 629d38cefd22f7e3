"""Several processes: real gloo groups, each process a fork that torchrun might have started."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comlrl.processes.distributed import LostPeer, balanced
from tests.support import loops, tiny_models
from tests.support.runs import (
    CLOCK,
    Zygote,
    state,
    together,
)

# The seam


def check_seam() -> None:
    from comlrl.processes import distributed

    distributed.start()
    size, rank = distributed.world_size(), distributed.rank()
    items = list(range(7))
    own = distributed.shard(items)
    assert own == items[rank::size]
    dealt = distributed.deal(items, lambda item: 2**item)
    assert (6 in dealt.shard(items)) == (dealt.shard(items) == [6]) == (rank == 0)
    for deal in (distributed.deal(items), dealt):
        check_deal(deal, items)
    one = distributed.deal(items[:1])
    assert one.gather(one.shard(items[:1])) == items[:1]
    assert distributed.all_gather(rank) == list(range(size))
    assert distributed.from_main(lambda: ("made by", rank)) == ("made by", 0)
    assert distributed.total(rank + 1) == size * (size + 1) / 2
    assert distributed.all_reduce_counts({"a": rank, "b": 1})["b"] == size
    check_gradients(rank, size)
    assert distributed.in_sync([torch.ones(3), torch.zeros(2, dtype=torch.bfloat16)])
    # One bit apart is apart; 0.0 and -0.0 are equal numbers and not equal bits.
    assert not distributed.in_sync([torch.tensor(0.0 if rank else -0.0)])
    distributed.stop()


def check_deal(deal: Any, items: list[int]) -> None:
    """Item i comes to i pieces: i = 0 … 6 stand at 0, 0, 1, 3, 6, 10, 15, in all 21."""
    own = deal.shard(items)
    assert deal.gather(own) == items
    starts = [0, 0, 1, 3, 6, 10, 15]
    assert deal.positions(own) == ([starts[i] + k for i in own for k in range(i)], 21)


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


def loads(costs: list[int], ranks: Sequence[int], size: int) -> list[int]:
    pairs = list(zip(costs, ranks, strict=True))
    return [sum(cost for cost, r in pairs if r == rank) for rank in range(size)]


def test_tasks_are_dealt_by_cost() -> None:
    """No process has more than where tasks are dealt in turn, and each has a task where there are
    enough."""
    draw = random.Random(0)
    for _ in range(300):
        size, count = draw.randint(1, 5), draw.randint(0, 12)
        costs = [draw.choice((1, 1, 2, 3, 50)) * draw.randint(1, 400) for _ in range(count)]
        ranks, in_turn = balanced(costs, size), tuple(i % size for i in range(count))
        assert max(loads(costs, ranks, size)) <= max(loads(costs, in_turn, size))
        assert len(set(ranks)) == min(size, count)
        assert balanced([7] * count, size) == in_turn


def test_a_long_task_has_a_process_of_its_own() -> None:
    assert balanced([1, 9, 1, 1, 1], 2) == (1, 0, 1, 1, 1)
    assert balanced([3, 3, 2, 2, 2], 2) == (0, 1, 0, 1, 0)  # in turn 7 and 5, sorted 7 and 5
    assert balanced([8, 1, 8, 1], 2) == (0, 0, 1, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_seam(zygote: Zygote, size: int) -> None:
    together(zygote, __file__, size, "check_seam")


# The update: K processes against one


def tiny_model() -> str:
    return str(tiny_models.folder("qwen2"))


def update(folder: str, model: str, tasks: int, algorithm: str, keys: dict[str, Any]) -> None:
    """Grow the trees of ``tasks`` tasks and update a team; rank 0 saves the weights."""
    from comlrl.models.pretrained import build_team
    from comlrl.processes import distributed
    from comlrl.rollout.grow import Rollout
    from comlrl.trainers.launch.wiring.assembly import build_critic_team, build_sampler
    from comlrl.trainers.magrpo import MAGRPOTrainer
    from comlrl.trainers.ppo import PPOTrainer
    from comlrl.trainers.shppo import SHPPOTrainer
    from comlrl.types import Sampling
    from tests.support.fakes import PROMPTS, FakeTransition, task
    from tests.support.tiny_trainers import Recorder

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
    rollout = Rollout(
        sampler, Length(rare=bool(getattr(section, "refill", 0))), FakeTransition(), PROMPTS, seed=1
    )
    named, logger = [task(f"task_{i}") for i in range(tasks)], Recorder()
    loop = loops.loop(section, named, Path(folder), logger)
    loop.cost = lambda item: 2 ** int(item.task_id.removeprefix("task_"))  # not dealt in turn
    trainer: Any
    if algorithm == "magrpo":
        trainer = MAGRPOTrainer(section, team, rollout, loop, sampling)
    elif algorithm == "ppo":
        critics = build_critic_team(config, config.section, team)
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
        return tuple(self.team.actor(agent).encode(prompt))[-60:]

    def fits(self, agent: int, prompt_ids: Any, sampling: Any) -> bool:
        return True

    def token_texts(self, agent: int, token_ids: Any) -> list[str]:
        return [str(token) for token in token_ids]

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
    """Between 0 and 1, so that some trees end early and counts are uneven; ``rare``: mostly 0, so
    that many tasks teach nothing."""

    def __init__(self, rare: bool) -> None:
        self.rare = rare

    def score(self, actions: Any) -> Any:
        from comlrl.types import Score

        lengths = [sum(map(len, a.completions_N)) % 10 for a in actions]
        return [Score(float(n == 9) if self.rare else n / 10) for n in lengths]

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
        together(zygote, __file__, 1, "update", str(made), tiny_model(), 5, *UPDATES[name])
        return made

    return folder


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in UPDATES), ("magrpo in order", 3), ("mappo by a model", 3)],
)
def test_k_processes_update_as_one(
    zygote: Zygote, alone: Callable[[str], Path], name: str, size: int
) -> None:
    """Five tasks over 2 or 3 processes, trees of uneven size, over two steps of every agent."""
    folder = alone(name)
    together(zygote, __file__, size, "update", str(folder), tiny_model(), 5, *UPDATES[name])
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
        together(zygote, __file__, size, "update", str(tmp_path), tiny_model(), 2, *UPDATES[name])
    one, many = (load_file(str(tmp_path / f"{n}.safetensors")) for n in (1, 3))
    near = (1e-3, 1e-5) if name.startswith("shppo") else (1e-5, 1e-7)  # its networks are float32
    for tensor in one:
        torch.testing.assert_close(many[tensor], one[tensor], rtol=near[0], atol=near[1])


def test_refilled_tasks_are_learned_from_as_one_process_does(
    zygote: Zygote, tmp_path: Path
) -> None:
    keys = PARTS | {"refill": 2, "handoff": "best"}
    for size in (1, 2):
        together(zygote, __file__, size, "update", str(tmp_path), tiny_model(), 14, "magrpo", keys)
    one, many = (load_file(str(tmp_path / f"{n}.safetensors")) for n in (1, 2))
    for tensor in one:
        torch.testing.assert_close(many[tensor], one[tensor], rtol=1e-5, atol=1e-7)
    logs = [json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2)]
    assert [line["tasks"] for line in logs[0]] == [line["tasks"] for line in logs[1]]
    assert logs[0][0]["tasks"] > 5


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LostPeer("Connection reset by peer"), True),
        (torch.distributed.DistNetworkError("Broken pipe"), True),
        (RuntimeError("shapes do not fit"), False),
        (ConnectionResetError("a logger's"), False),
    ],
)
def test_only_a_collective_call_loses_a_peer(error, lost, monkeypatch):
    from comlrl.processes import distributed

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distributed.lost_peer(error) == lost
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not distributed.lost_peer(error)
