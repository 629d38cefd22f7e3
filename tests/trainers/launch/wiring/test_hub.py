"""Names that only the hub can resolve, where it does not answer; names with a mistake in them."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from comlrl.errors import UserError
from comlrl.trainers.launch.commands.train import main
from comlrl.trainers.launch.wiring import hub
from tests.support.runs import resolved

QUICK = Path(__file__).parents[4] / "configs" / "magrpo_quickstart.yaml"


def arguments(*overrides: str) -> list[str]:
    return ["--config", str(QUICK), "--override", *overrides]


@pytest.fixture(autouse=True)
def out_of_reach(monkeypatch, tmp_path):
    """A hub at a port where nobody listens, and an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache/hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/datasets")
    monkeypatch.setenv(hub.OFFLINE, "0")  # and restored


@pytest.mark.parametrize("item", ["dataset.name=some/rows", "agent_model.name=some/model"])
def test_a_hub_out_of_reach_refuses_at_once(item, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main("magrpo", None, arguments(item, "output.dir=out")) == 2
    error = capsys.readouterr().err
    key, _, name = item.partition("=")
    assert error.startswith(f"error: {key}: '{name}' is not a local folder (looked in ")
    assert "http://127.0.0.1:9 does not answer" in error and error.count("\n") == 1
    assert not Path("out").exists()


def test_the_cache_is_enough_and_libraries_are_kept_to_it(tmp_path):
    import os

    (tmp_path / "cache/hub/models--some--model/snapshots/1").mkdir(parents=True)
    (tmp_path / "cache/hub/models--some--model/refs").mkdir()
    (tmp_path / "cache/hub/models--some--model/refs/main").write_text("1")
    (tmp_path / "cache/datasets/some___rows").mkdir(parents=True)
    found, *_ = resolved(QUICK, "agent_model.name=some/model", "dataset.name=some/rows")
    named = [("dataset.name", found.dataset.name), *found.named_models]
    hub.check_reachable(named, found.beside)
    assert os.environ[hub.OFFLINE] == "1" and constants.HF_HUB_OFFLINE


def test_nobody_asks_the_hub_for_what_is_here(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda: 1 / 0)
    found, *_ = resolved(QUICK)
    named = [("dataset.name", found.dataset.name), *found.named_models]
    hub.check_reachable(named, found.beside)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-", "a--b", "foo..bar"])
@pytest.mark.parametrize("key", ["dataset.name", "agent_model.name"])
def test_what_is_no_name_of_the_hub_is_refused(key, name, capsys):
    assert main("magrpo", None, [*arguments(f"{key}={name}"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}: '{name}'") and error.count("\n") == 1


@pytest.mark.parametrize("key", ["dataset.name", "agent_model.name"])
def test_a_builtin_with_a_slip(key):
    meant = {"dataset.name": "builtin:coopmini", "agent_model.name": "builtin:tiny-coder"}[key]
    found, *_ = resolved(QUICK, f"{key}={meant.replace('builtin', 'bultin')}")
    with pytest.raises(UserError, match=f"{key}: .* did you mean `{meant}`"):
        hub.check_data(found.dataset.name, found.beside)
        hub.check_model(key, found.agent_model.name, found.beside)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            "[q_proj,v_prj]",
            "'v_prj' is not a layer of 'builtin:tiny-coder'; did you mean `v_proj`",
        ),
        ("[nothing]", "choose from down_proj, "),
        ("model.*q_prj", "'model.*q_prj' is not a layer"),
        ("[q_proj,embed_tokens]", "'model.embed_tokens'"),
        (".*(q_proj|embed_tokens)", "'model.embed_tokens'"),
        ("[q_proj,input_layernorm]", "'model.layers.0.input_layernorm'"),
        ("[1]", "[1]"),
        ("[]", "[]"),
        ("{q_proj: 1}", "{'q_proj': 1}"),
    ],
)
def test_target_modules_that_match_nothing_are_refused_in_the_dry_run(given, named, capsys):
    assert main("magrpo", None, [*arguments(f"lora.target_modules={given}"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: lora.target_modules: ") and named in error


@pytest.mark.parametrize("given", ["[]", "[nothing]"])
def test_errors_of_one_agents_adapter_name_its_key(given, capsys):
    keys = arguments(f"agents.aux.lora.target_modules={given}")
    assert main("magrpo", None, [*keys, "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: agents.aux.lora.target_modules: ")


@pytest.mark.parametrize("good", ["[q_proj,v_proj]", ".*q_proj", "[layers.0.self_attn.q_proj]"])
def test_target_modules_that_match_pass_the_dry_run(good):
    assert main("magrpo", None, [*arguments(f"lora.target_modules={good}"), "--dry-run"]) == 0


@pytest.mark.parametrize("key", ["agent_model.name", "agents"])
def test_a_gguf_file_is_refused(key, capsys, tmp_path):
    (file := tmp_path / "tiny.gguf").touch()
    value = f"[{file},{file}]" if key == "agents" else file
    assert main("magrpo", None, arguments(f"{key}={value}")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}: '{file}'") and error.count("\n") == 1
