"""Exported weights: what plain transformers loads computes what the team computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.builtin import TINY_CODER
from comlrl.models.pretrained import build_team
from comlrl.run_files import HETEROGENEOUS
from comlrl.trainers.launch.commands import export
from tests.support.runs import ROOT, resolved

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[torch.Tensor]]:
    """A run's folder with adapters that do something, and each agent's logits."""
    folder = tmp_path_factory.mktemp("run")
    quickstart = ROOT / "configs/magrpo_quickstart.yaml"
    config, *_ = resolved(quickstart, "agent_model.torch_dtype=float32")
    team = build_team(config, device="cpu")
    torch.manual_seed(1)
    for name, weight in team.agents[0].model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.05)
    team.save(folder / "final_model")
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    logits = []
    for agent in ("agent_0", "agent_1"):  # as PEFT computes them
        base = AutoModelForCausalLM.from_pretrained(TINY_CODER, dtype=torch.float32)
        with torch.no_grad():
            logits.append(
                PeftModel.from_pretrained(base, folder / "final_model" / agent)(IDS).logits
            )
    return folder, logits


def test_a_merged_model_is_the_agent(run, tmp_path):
    folder, expected = run
    out = tmp_path / "merged"
    assert export.main([str(folder), "--merge", "--out", str(out)]) == 0
    assert not torch.allclose(*expected, atol=1e-3)
    for agent, logits in enumerate(expected):
        model = AutoModelForCausalLM.from_pretrained(out / f"agent_{agent}")
        assert not (out / f"agent_{agent}" / export.ADAPTER).exists()
        torch.testing.assert_close(model(IDS).logits, logits, atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(out / "agent_1").eos_token_id == 0
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]  # nothing is left beside it


def test_adapters_are_written_as_they_are(run, tmp_path):
    folder, _ = run
    assert export.main([str(folder / "final_model"), "--out", str(tmp_path / "out")]) == 0
    for agent in ("agent_0", "agent_1"):
        name = f"{agent}/adapter_model.safetensors"
        assert (tmp_path / "out" / name).read_bytes() == (
            folder / "final_model" / name
        ).read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "RUN: 'nowhere' does not exist"),
        (["RUN", "--out", "."], "exists already"),
        (["RUN", "--push", "name"], "use USER/NAME"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_what_cannot_be_exported_is_refused_at_once(run, words, message, capsys):
    words = [str(run[0]) if word == "RUN" else word for word in words]
    assert export.main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_one_policy_with_networks_beside_it_is_not_merged(run, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text((run[0] / "config.yaml").read_text())
    (tmp_path / "final_model" / "agent_0").mkdir(parents=True)
    (tmp_path / "final_model" / HETEROGENEOUS).mkdir()
    assert export.main([str(tmp_path), "--merge"]) == 2
    assert "differ by networks" in capsys.readouterr().err


def test_push_goes_to_a_private_repository_and_tells_what_fails(run, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    asked = []

    class Hub:
        def create_repo(self, name, **how):
            asked.append((name, how))
            return f"https://hub/{name}"

        def upload_folder(self, repo_id, folder_path):
            asked.append((repo_id, sorted(path.name for path in folder_path.glob("agent_*"))))
            if repo_id == "me/broken":
                raise OSError("no leave to write")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    words = [str(run[0]), "--out", str(tmp_path / "a"), "--push", "me/team"]
    assert export.main(words) == 0
    assert asked == [
        ("me/team", {"private": True, "exist_ok": True}),
        ("me/team", ["agent_0", "agent_1"]),
    ]
    assert "pushed: https://hub/me/team" in capsys.readouterr().out
    words = [str(run[0]), "--out", str(tmp_path / "b"), "--push", "me/broken"]
    assert export.main(words) == 2
    assert "no leave to write; log in with `hf auth login`" in capsys.readouterr().err
    assert (tmp_path / "b" / "agent_0").is_dir()
