"""The model card of a run made by hand, and the program in it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from comlrl.loggers.model_card import write_model_card
from comlrl.models.pretrained import build_team
from comlrl.trainers.launch.wiring.assembly import build_sampler, saver
from comlrl.types import Message, Request, Sampling
from tests.support import tiny_models
from tests.support.made_runs import make_run
from tests.support.runs import ROOT


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "magrpo_mini_1", updates=10)
    for agent in range(2):
        (run / "final_model" / f"agent_{agent}").mkdir(parents=True)
    (run / "final_model" / "README.md").write_text("[More Information Needed]")
    return run


def _with(run_dir: Path, **sections: dict) -> None:
    file = run_dir / "config.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(config | sections))


def _front_matter(text: str) -> dict:
    _, facts, _ = text.split("---\n", 2)
    return yaml.safe_load(facts)


def test_card_names_roles_results_and_the_way_back(run_dir):
    text = write_model_card(run_dir, "MAGRPO (arXiv 2508.04652)").read_text()
    assert "| `agent_0` |  aux |" in text
    assert "| `agent_1` | main |" in text
    assert "MAGRPO (arXiv 2508.04652)" in text
    assert "12 tasks of `builtin:coopmini`" in text  # the hand-made run evaluates twelve
    assert "evaluate.py --checkpoint" in text
    assert (run_dir / "final_model" / "README.md").read_text() == text  # PEFT's empty form is gone
    assert (run_dir / "final_model" / "agent_1" / "README.md").read_text() == text


def test_a_small_learning_rate_is_shown(run_dir):
    section = yaml.safe_load((run_dir / "config.yaml").read_text())["magrpo"]
    _with(run_dir, magrpo=section | {"learning_rate": 2e-5})
    assert "| 2e-05 |" in write_model_card(run_dir, "MAGRPO").read_text()


def test_more_than_ten_agents_stand_in_their_order(run_dir):
    for agent in range(2, 12):
        (run_dir / f"final_model/agent_{agent}").mkdir()
    listed = re.findall(r"^\| `agent_(\d+)`", write_model_card(run_dir).read_text(), re.M)
    assert list(map(int, listed)) == list(range(12))


def test_card_names_the_model_that_all_agents_override_to(run_dir):
    model = {"model": "Qwen/Qwen2.5-Coder-3B"}
    _with(run_dir, agent_model={"name": "another/model"}, agents={"aux": model, "main": model})
    text = write_model_card(run_dir).read_text()
    assert _front_matter(text)["base_model"] == "Qwen/Qwen2.5-Coder-3B"
    assert "another/model" not in text


def test_front_matter_names_what_a_hub_knows_and_nothing_local(run_dir):
    _with(
        run_dir,
        agent_model={"name": "Qwen/Qwen2.5-Coder-3B"},
        dataset={"name": "openai/openai_humaneval", "train_split": "test[33:163]"},
        lora={"enabled": True, "r": 16},
    )
    facts = _front_matter(write_model_card(run_dir).read_text())
    assert facts["base_model"] == "Qwen/Qwen2.5-Coder-3B"
    assert facts["datasets"] == ["openai/openai_humaneval"]
    assert facts["library_name"] == "peft"
    _with(run_dir, agent_model={"name": "/data/model"}, dataset={"name": "builtin:coopmini"})
    facts = _front_matter(write_model_card(run_dir).read_text())
    assert "base_model" not in facts and "datasets" not in facts


def test_a_run_that_never_evaluated_has_no_results(run_dir):
    (run_dir / "summary.json").write_text('{"algorithm": "magrpo", "eval_start": null}')
    assert "## Results" not in write_model_card(run_dir).read_text()


# What the card says loads what was trained

CARDS = {
    "adapters": {},
    "two bases": {"agents": [str(tiny_models.folder(kind)) for kind in ("qwen2", "llama")]},
    "whole models": {"lora__enabled": False, "output__save_final_model": True},
    "builtin": {"agent_model__name": "builtin:tiny-coder"},
    "shppo": {"agent_model__stop": ["e", "a"]},
    "ppo": {"num_agents": 2, "shared_policy": True},
}


@pytest.mark.parametrize("kind", CARDS)
def test_the_snippet_loads_what_was_trained(kind: str, tmp_path: Path) -> None:
    """By itself; its numbers are those of the team that was saved."""
    algorithm = kind if "ppo" in kind else "magrpo"
    keys = {"agent_model__name": str(tiny_models.folder("qwen2"))} | CARDS[kind]
    config = tiny_models.config(algorithm, agent_model__torch_dtype="float32", **keys)
    team = build_team(config, device="cpu")
    _, sampler = build_sampler(config, team)
    with torch.no_grad():
        parts = [p for agent in team.agents for p in agent.parameters()]
        parts += [sampler.policy.layer.B.weight] if kind == "shppo" else []
        for part in parts:
            part += 0.1 * torch.randn_like(part)
    run = make_run(tmp_path / "run", updates=10, algorithm=algorithm)
    (run / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    saver(team, sampler)(run / "final_model")
    text = write_model_card(run).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    ids = [5, 6, 7, 8]
    if kind == "shppo":
        asked = [(Message("user", f"What {who} is asked."),) for who in ("aux", "main")]
        requests = [
            [Request(sampler.encode(i, prompt), (("key", "task", (), i, 0),))]
            for i, prompt in enumerate(asked)
        ]
        expected = [
            completions_G[0].text
            for (completions_G,) in sampler.sample(requests, Sampling(0.0, 64, stop=("e", "a")))
        ]
        printed = _run(code + "import json; print(json.dumps(answers))", alone=False)
        assert json.loads(printed) == expected
        return
    names = {name: name for name in (("everyone",) if kind == "ppo" else ("aux", "main"))}
    if kind in ("adapters", "builtin", "ppo"):
        names = {name: f"(team.set_adapter('{name}'), team)[1]" for name in names}
    code += "import json, torch\n"
    code += "".join(
        f"print(json.dumps({model}(torch.tensor([{ids}])).logits[0, -1, :8].tolist()))\n"
        for model in names.values()
    )
    found = [
        json.loads(line) for line in _run(code, kind == "adapters").splitlines()[-len(names) :]
    ]
    for index, logits in enumerate(found):
        with torch.no_grad(), team.acting(index) as agent:
            own = agent.logits(agent.hidden(input_ids=torch.tensor([ids])))[0, -1, :8]
        near = 0.05 if kind == "builtin" else 1e-3  # its file is in bfloat16
        torch.testing.assert_close(torch.tensor(logits), own, rtol=near, atol=near)
    if kind == "builtin":  # the name that the user gave, not where it was found
        file = run / "final_model/agent_0/adapter_config.json"
        assert json.loads(file.read_text())["base_model_name_or_path"] == "builtin:tiny-coder"


def _run(code: str, alone: bool) -> str:
    """What it prints; ``alone``: in its own process."""
    if not alone:
        with contextlib.redirect_stdout(io.StringIO()) as printed, torch.no_grad():
            exec(code, {})
        return printed.getvalue()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"
    return done.stdout
