"""Agents with ``train: false``: they act, and nothing of them moves."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from comlrl.models.team import Team
from comlrl.train_magrpo import build as build_magrpo
from comlrl.trainers.launch.commands.evaluate import main as evaluate
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.magrpo import MAGRPOTrainer
from tests.support.gradients import kept
from tests.support.runs import ROOT, small, small_of
from tests.support.tiny_trainers import build, grown, rolled, share_of_letters

PPO = {"num_agents": 2}
CENTRALIZED = {**PPO, "critic": "centralized", "granularity": "turn", "kl_coef": 0.1}


def weights(team: Team, agent: int) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in team.agents[agent].named().items()}


def same(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def run(folder: Path, *more: str, **section: object) -> int:
    return main("magrpo", build_magrpo, [*small("magrpo", folder, **section), *more])


def final(folder: Path, agent: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "final_model" / f"agent_{agent}" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("magrpo", {}),
        ("magrpo", {"kl_coef": 0.1, "update_epochs": 2, "entropy_coef": 0.01}),
        ("magrpo", {"num_turns": 2, "turn_order": "sequential"}),
        ("magrpo", {"lora__enabled": False, "kl_coef": 0.1}),
        ("ppo", PPO),
        ("ppo", {**PPO, "kl_coef": 0.1}),
        ("ppo", CENTRALIZED),
    ],
)
@pytest.mark.parametrize("frozen", [0, 1])
def test_an_untrained_agent_keeps_its_bits_and_the_other_moves(tmp_path, algorithm, keys, frozen):
    role = ("aux", "main")[frozen]
    trainer = build(
        algorithm, tmp_path, share_of_letters, learning_rate=0.01, max_steps=2,
        agents={role: {"train": False}}, **keys,
    )  # fmt: skip
    before = [weights(trainer.team, i) for i in range(2)]
    trainer.train()
    after = [weights(trainer.team, i) for i in range(2)]
    assert same(before[frozen], after[frozen])
    assert not same(before[1 - frozen], after[1 - frozen])
    assert not {f"agent_{frozen}", f"optimizer_{frozen}"} & trainer.parts().keys()
    assert all(p.grad is None for p in trainer.team.agents[frozen].named().values())


@pytest.mark.parametrize("frozen", [0, 1])
def test_the_other_agents_gradient_is_unchanged(tmp_path, frozen):
    """The gradient of each agent is that of the team's reward by its weights alone."""
    found = []
    for agents in (None, {("aux", "main")[frozen]: {"train": False}}):
        trainer = build("magrpo", tmp_path, share_of_letters, count=3, agents=agents)
        assert isinstance(trainer, MAGRPOTrainer)
        found.append(kept(trainer.optimizers))
        step = rolled(grown(trainer))
        trainer.learn(step, trainer.credit(step))
    assert found[1].keys() == {1 - frozen}
    (whole,), (alone,) = found[0][1 - frozen], found[1][1 - frozen]
    assert any(float(g.abs().max()) > 0 for g in whole)
    assert all(torch.equal(one, other) for one, other in zip(whole, alone, strict=True))


def test_an_agents_learning_rate_is_its_optimizers(tmp_path):
    agents = {"aux": {"learning_rate": 0.5}}
    trainer = build("magrpo", tmp_path, share_of_letters, learning_rate=0.25, agents=agents)
    assert [optimizer.peak for optimizer in trainer.optimizers] == [0.5, 0.25]


@pytest.mark.slow
def test_a_run_against_an_earlier_runs_frozen_agent(tmp_path):
    """Train aux against a frozen main, then main against that aux: stopped and resumed, the
    second run has the bits of the whole one."""
    aux, whole, stopped = (tmp_path / name for name in ("aux", "main", "stopped"))
    keys = {"max_new_tokens": 40, "num_generations": 4, "lr_scheduler": "constant"}
    assert run(aux, "agents.main.train=false", **keys) == 0
    second = ("agents.aux.train=false", f"init_from={aux}")
    assert run(whole, *second, **keys) == 0
    assert same(final(aux, 0), final(whole, 0))
    assert not same(final(aux, 1), final(whole, 1))
    checkpoint = sorted((whole / "checkpoints").iterdir())[-1]
    assert not (checkpoint / "agent_0.safetensors").exists()
    assert run(stopped, *second, **keys, max_steps=2) == 0
    assert run(stopped, *second, "--resume", **keys, max_steps=4) == 0
    for agent in (0, 1):
        assert same(final(whole, agent), final(stopped, agent))

    rewards = []
    for where in (whole, checkpoint):
        out = tmp_path / "evaluation.json"
        assert evaluate(["--checkpoint", str(where), "--out", str(out)]) == 0
        rewards.append(json.loads(out.read_text())["per_task"])
    assert rewards[0] == rewards[1]


@pytest.mark.slow
def test_a_run_whose_partner_has_changed_or_gone_is_not_resumed(tmp_path, capsys):
    start, resumed = tmp_path / "aux", tmp_path / "main"
    second = ("agents.aux.train=false", f"init_from={start}")
    assert run(start, "agents.main.train=false", max_steps=1) == 0
    assert run(resumed, *second, max_steps=1) == 0
    file = start / "final_model/agent_0/adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first] + 1e-3}, file)
    capsys.readouterr()
    assert run(resumed, *second, "--resume", max_steps=2) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: init_from")
    start.rename(tmp_path / "away")
    assert run(resumed, *second, "--resume", max_steps=2) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: init_from")
    save_file(tensors, tmp_path / "away" / file.relative_to(start))
    (tmp_path / "away").rename(start)
    assert run(resumed, *second, "--resume", max_steps=2) == 0


@pytest.mark.slow
def test_adapters_of_other_ranks_and_layers(tmp_path):
    """Each agent's adapter is its own; weights are saved, evaluated and started from."""
    lora = "agents.main.lora={r: 2, target_modules: [q_proj, v_proj]}"
    start = tmp_path / "run"
    assert run(start, lora) == 0
    aux, main_agent = (final(start, agent) for agent in (0, 1))
    assert {min(w.shape) for w in aux.values()} == {4}
    assert {min(w.shape) for w in main_agent.values()} == {2}
    assert {name.split(".")[-3] for name in main_agent} == {"q_proj", "v_proj"}
    assert {name.split(".")[-3] for name in aux} > {"q_proj", "v_proj"}
    out = tmp_path / "evaluation.json"
    assert evaluate(["--checkpoint", str(start), "--out", str(out)]) == 0
    assert run(tmp_path / "second", lora, f"init_from={start}") == 0
    assert run(tmp_path / "third", lora, f"init_from={start}", "agents.main.lora.r=3") == 2
    assert run(tmp_path / "fourth", lora, "lora.enabled=false") == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["madpo", "marlhf", "program"])
def test_the_frozen_agent_of_a_run_keeps_its_weights(tmp_path, algorithm):
    arguments = small_of(algorithm.replace("program", "magrpo"), tmp_path / "run")
    role = "aux"
    if algorithm == "program":
        role = "helper"
        arguments[1] = str(ROOT / "configs/magrpo_program_quickstart.yaml")
        arguments += ["magrpo.max_new_tokens=40", "magrpo.num_generations=4"]
    name = arguments[1].split("/")[-1].split("_")[0]
    build_run = importlib.import_module(f"comlrl.train_{name}").build
    assert main(name, build_run, [*arguments, f"agents.{role}.train=false"]) == 0
    for agent, moves in ((0, False), (1, True)):
        tensors = final(tmp_path / "run", agent)
        added = [value for key, value in tensors.items() if "lora_B" in key]  # 0 at the start
        assert any(bool(value.any()) for value in added) == moves
