"""``init_from``: what a run starts from, and that its reference is just that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from comlrl.config.resolved import Config
from comlrl.errors import UserError
from comlrl.models.pretrained import build_team
from comlrl.models.team import Team
from comlrl.trainers.launch.wiring import init_from
from comlrl.trainers.launch.wiring.assembly import build_sampler, saver
from tests.support import tiny_models
from tests.support.runs import (
    ROOT,
    Zygote,
    assert_in_sync,
    metrics,
    newest_step,
    small,
    small_of,
    state,
    weights,
)
from tests.support.tiny_trainers import build as build_trainer
from tests.support.tiny_trainers import share_of_letters

IDS = torch.tensor([tiny_models.prompt("def f(x): return x")])
SLOW = ("magrpo", "marlhf", "ppo")


def configured(algorithm: str = "magrpo", kind: str = "qwen2", **keys: Any) -> Config:
    keys = {"agent_model__name": str(tiny_models.folder(kind))} | keys
    return tiny_models.config(algorithm, agent_model__torch_dtype="float32", **keys)


def changed(team: Team, seed: int, scale: float = 0.1) -> Team:
    """Weights that are not what they were."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for agent in team.agents:
            for parameter in agent.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    return team


def run_of(folder: Path, config: Config, seed: int = 1) -> Team:
    """A run directory with a final model, and what is in it."""
    team = changed(build_team(config, device="cpu"), seed)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    _, sampler = build_sampler(config, team)
    saver(team, sampler)(folder / "final_model")
    return team


def begun(config: Config, reference: bool = True) -> Team:
    team = build_team(config, reference=reference, device="cpu")
    _, sampler = build_sampler(config, team)
    init_from.begin(config, team, sampler)
    return team


@torch.no_grad()
def logits(team: Team, index: int, reference: bool = False) -> torch.Tensor:
    with (team.reference if reference else team.acting)(index) as agent:
        hidden = agent.hidden(input_ids=IDS)
        if agent.fast is not None and agent.fast.learning:  # also the way that updates take
            from comlrl.models.fast.packed_attention import Packed
            from comlrl.models.rows import pack
            from comlrl.types import Row

            batch = pack([Row(tuple(IDS[0].tolist()), (), (), (0,))], 0)
            fast = agent.fast.packed(Packed(batch, agent.device, agent.fast.step))
            torch.testing.assert_close(fast[: IDS.shape[1]], hidden[0], rtol=1e-3, atol=1e-4)
        return agent.logits(hidden)


CASES = {
    "fast": {}, "peft": {"kind": "gpt2"}, "whole models": {"lora__enabled": False},
    "separate models": {"agents": [str(tiny_models.folder(k)) for k in ("qwen2", "gpt2")]},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_team_starts_from_a_run_and_so_does_its_reference(tmp_path: Path, case: str) -> None:
    source = run_of(tmp_path / "run", configured(**CASES[case]))
    team = begun(configured(init_from=str(tmp_path / "run"), **CASES[case]))
    trained = [len(list(agent.parameters())) for agent in source.agents]
    changed(team, 2)
    for i in range(2):
        assert torch.allclose(logits(team, i, reference=True), logits(source, i), atol=1e-4)
        assert not torch.allclose(logits(team, i), logits(source, i), atol=1e-2)
        with team.acting(i) as agent, team.reference(i):
            pass
        assert not torch.allclose(logits(team, i), logits(source, i), atol=1e-2)
        assert len(list(agent.parameters())) == trained[i]  # the reference is nobody's to train
    frozen = [p for a in team.agents for p in a.model.parameters() if not p.requires_grad]
    frozen += [p for a in team.agents if a.start for p in a.start.model.parameters()]
    assert not {id(p) for p in frozen} & {id(p) for a in team.agents for p in a.parameters()}


@pytest.mark.parametrize("case", ["fast", "whole models"])
def test_a_checkpoint_holds_the_reference(tmp_path: Path, case: str) -> None:
    """A resumed run needs nothing of what it once started from."""
    source = run_of(tmp_path / "run", configured(**CASES[case]))
    config = configured(init_from=str(tmp_path / "run"), **CASES[case])
    held = state(changed(begun(config), 2))
    assert sorted(held) == ["agent_0", "agent_1", "reference_0", "reference_1"]
    shutil.rmtree(tmp_path / "run")
    resumed = build_team(config, reference=True, device="cpu")
    resumed.load_tensors(held)
    for i in range(2):
        assert torch.allclose(logits(resumed, i, reference=True), logits(source, i), atol=1e-4)
        assert not torch.allclose(logits(resumed, i), logits(source, i), atol=1e-2)
    plain = build_team(configured(**CASES[case]), reference=True, device="cpu")
    assert sorted(plain.parts()) == ["agent_0", "agent_1"]  # its base is at hand


def test_all_agents_start_from_the_one_there_is(tmp_path: Path) -> None:
    """A GRPO run, one agent's folder of a team, and an adapter that PEFT itself has made."""
    grpo = run_of(tmp_path / "grpo", configured("grpo"))
    run_of(tmp_path / "pair", configured("magrpo", seed=3), seed=3)
    model = AutoModelForCausalLM.from_pretrained(tiny_models.folder("qwen2"), dtype=torch.float32)
    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    peft = get_peft_model(model, settings)
    peft.save_pretrained(str(tmp_path / "peft"))
    with torch.no_grad():
        by_peft = peft(IDS).logits
    for place, expected in {"grpo": logits(grpo, 0), "peft": by_peft}.items():
        for size in (2, 3):
            team = begun(configured(num_agents=size, init_from=str(tmp_path / place)))
            for i in range(size):
                torch.testing.assert_close(logits(team, i), expected, rtol=1e-4, atol=1e-4)
    one = str(tmp_path / "pair/final_model/agent_1")
    config = configured(num_agents=3, init_from=one)
    source, notices = init_from.check(config)
    assert source.agents == 1
    assert notices == [f"init_from: '{one}' holds one agent, from which all 3 start"]
    base = AutoModelForCausalLM.from_pretrained(tiny_models.folder("qwen2"), dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, one)(IDS).logits
    torch.testing.assert_close(logits(begun(config), 0), expected, rtol=1e-4, atol=1e-4)


def test_shppo_takes_its_networks_along_and_others_its_adapter(tmp_path: Path) -> None:
    config = configured("shppo", kl_coef=0.1)
    team = build_team(config, device="cpu")
    _, sampler = build_sampler(config, team)
    changed(team, 1)
    with torch.no_grad():
        sampler.policy.layer.B.weight.normal_()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    saver(team, sampler)(tmp_path / "run/final_model")
    again = configured("shppo", num_agents=3, init_from=str(tmp_path / "run"))
    other = build_team(again, device="cpu")
    _, taken = build_sampler(again, other)
    init_from.begin(again, other, taken)
    for name, value in sampler.policy.state_dict().items():
        assert torch.equal(taken.policy.state_dict()[name], value), name
    magrpo = configured(init_from=str(tmp_path / "run"))
    assert any("its networks are not" in text for text in init_from.check(magrpo)[1])
    torch.testing.assert_close(logits(begun(magrpo), 1), logits(team, 0), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"set shppo\.latent_dim=8"):
        init_from.check(configured("shppo", latent_dim=5, init_from=str(tmp_path / "run")))
    run_of(tmp_path / "pair", configured())
    with pytest.raises(UserError, match="with one policy; use the folder of one of them"):
        init_from.check(configured("shppo", init_from=str(tmp_path / "pair")))


def test_shppos_kl_is_zero_at_the_start_whatever_it_starts_from(tmp_path: Path) -> None:
    """Its layer is part of what it started from."""
    trainer = build_trainer("shppo", tmp_path / "run", share_of_letters, kl_coef=0.1, max_steps=1)
    with torch.no_grad():
        trainer.policy.layer.B.weight.normal_()
    trainer.start_layer.load_state_dict(trainer.policy.layer.state_dict())
    trainer.train()
    assert trainer.loop.logger.metrics()[0]["kl"] == pytest.approx(0, abs=1e-5)


OTHER_LORA: dict[str, dict[str, Any]] = {  # settings of adapters that compute something else
    **{
        start: {"init_lora_weights": start}
        for start in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
    },
    "alora": {"alora_invocation_tokens": [1, 2]},
    "qalora": {"use_qalora": True},
    "replicated": {"layer_replication": [[0, 1], [0, 2]]},
    "transposed": {"fan_in_fan_out": True},
    "tokens": {"trainable_token_indices": [3]},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    run_of(folder / "pair", configured())
    run_of(folder / "whole", configured(lora__enabled=False))
    run_of(folder / "rank", configured(lora__r=4))
    run_of(folder / "queries", configured(lora__target_modules=["q_proj"]))
    shutil.copytree(folder / "pair/final_model/agent_0", folder / "dora")
    adapter = json.loads((folder / "dora/adapter_config.json").read_text())
    (folder / "dora/adapter_config.json").write_text(json.dumps(adapter | {"use_dora": True}))
    for case, other in OTHER_LORA.items():
        shutil.copytree(folder / "pair/final_model/agent_0", folder / case)
        (folder / case / "adapter_config.json").write_text(json.dumps(adapter | other))
    (folder / "empty").mkdir()
    (folder / "empty/config.yaml").write_text("magrpo: {}\n")
    return folder


@pytest.mark.parametrize(
    ("place", "keys", "expected"),
    [
        ("nowhere", {}, "does not exist"),
        ("empty", {}, "is a run without weights"),
        ("whole/final_model/agent_0", {}, "is a whole model; set it as agent_model.name"),
        ("whole", {}, "holds all weights of whole models; set lora.enabled=false"),
        ("pair", {"lora__enabled": False}, "holds LoRA adapters; set lora.enabled=true"),
        ("rank", {}, "holds adapters of rank 4; set lora.r=4"),
        ("pair", {"lora__alpha": 7}, "holds adapters of alpha 32; set lora.alpha=32"),
        ("pair", {"num_agents": 3}, "pair/final_model/agent_1, and all start from that"),
        ("dora", {}, "sets use_dora=True in its adapter_config.json"),
        *((case, {}, f"sets {next(iter(other))}=") for case, other in OTHER_LORA.items()),
    ],
)
def test_what_cannot_be_started_from_is_one_line(
    sources: Path, place: str, keys: dict, expected: str
) -> None:
    with pytest.raises(UserError) as raised:
        init_from.check(configured(init_from=str(sources / place), **keys))
    message = str(raised.value)
    assert message.startswith(f"init_from: '{sources / place}'") and "\n" not in message
    assert expected in message


def test_the_adapter_of_a_gpt2_is_plain(tmp_path: Path) -> None:
    """PEFT sets ``fan_in_fan_out`` for its layers by itself."""
    config = configured(kind="gpt2")
    source = run_of(tmp_path / "run", config)
    one = tmp_path / "run/final_model/agent_0"
    settings = json.loads((one / "adapter_config.json").read_text()) | {"fan_in_fan_out": True}
    (one / "adapter_config.json").write_text(json.dumps(settings))
    team = begun(configured(kind="gpt2", init_from=str(one)))
    torch.testing.assert_close(logits(team, 1), logits(source, 0), rtol=1e-4, atol=1e-4)


def test_embeddings_get_no_adapter() -> None:
    for modules in (["q_proj", "embed_tokens"], ".*(q_proj|embed_tokens)"):
        with pytest.raises(UserError, match=r"lora.target_modules: .* names an embedding"):
            build_team(configured(lora__target_modules=modules), device="cpu")


def test_adapters_of_other_layers_and_other_models_are_refused(sources: Path) -> None:
    for place, keys in (("queries", {}), ("pair", {"lora__target_modules": ["q_proj"]})):
        with pytest.raises(UserError, match=r"init_from: .* does not fit .*lora.target_modules"):
            begun(configured(init_from=str(sources / place), **keys))
    config = configured(kind="llama", init_from=str(sources / "pair"))
    _, (notice,) = init_from.check(config)
    assert "and this run's base is" in notice


def test_an_adapter_is_no_model(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to be loaded without a word, and dropped."""
    from comlrl.trainers.launch.commands import evaluate
    from comlrl.trainers.launch.commands.train import main

    adapter, run = sources / "pair/final_model/agent_0", sources / "pair"
    cases = {
        f"agent_model.name={adapter}": f"agent_model.name: '{adapter}' holds an adapter",
        f"agents=[{adapter}, {adapter}]": f"agents: '{adapter}' holds an adapter",
        f"agent_model.name={run}": f"agent_model.name: '{run}' holds a run and no model",
    }
    for override, message in cases.items():
        for more in ([], ["--dry-run"]):
            arguments = [*small("magrpo", tmp_path / "out"), override, *more]
            assert main("magrpo", lambda run: pytest.fail("built"), arguments) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {message}") and "init_from=" in error
    assert not (tmp_path / "out").exists()
    quick = str(ROOT / "configs/magrpo_quickstart.yaml")
    assert evaluate.main(["--config", quick, "--override", f"agent_model.name={adapter}"]) == 2


# Real runs


@pytest.fixture(scope="module")
def grpo(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one agent; a push of its adapter stands for a longer training."""
    folder = tmp_path_factory.mktemp("grpo") / "run"
    zygote.finish("grpo", small("grpo", folder, max_steps=1, save_steps=0))
    push(folder, 0.05)
    return folder


def push(run: Path, scale: float) -> None:
    file = str(run / "final_model/agent_0/adapter_model.safetensors")
    generator = torch.Generator().manual_seed(1)
    pushed = {
        name: value + scale * torch.randn(value.shape, generator=generator)
        for name, value in load_file(file).items()
    }
    save_file(pushed, file)


@pytest.mark.slow
def test_a_run_goes_on_from_where_another_ended(zygote: Zygote, tmp_path: Path, grpo: Path) -> None:
    """The same tasks, keys and weights: its first evaluation is that of what it starts from."""
    from comlrl.trainers.launch.commands import evaluate

    grpo = Path(shutil.copytree(grpo, tmp_path / "grpo"))
    push(grpo, 0.2)
    folder, keys = tmp_path / "run", {"max_steps": 0, "max_new_tokens": 80}
    zygote.finish("grpo", [*small("grpo", folder, **keys), f"init_from={grpo}"])
    logged = metrics(folder)[0]["metrics"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["init_from"] == str(grpo)
    few = ["--override", "grpo.eval_num_samples=2", "grpo.max_new_tokens=80"]
    quick = ["--config", str(ROOT / "configs/grpo_quickstart.yaml")]
    cases = {
        "run": ["--checkpoint", str(grpo), *few],
        "untrained": [*quick, *few, f"init_from={grpo}", "lora.r=4"],
        "base": [*quick, *few],
    }
    found = {}
    for name, arguments in cases.items():
        out = tmp_path / f"{name}.json"
        assert evaluate.main([*arguments, "--out", str(out)]) == 0
        found[name] = json.loads(out.read_text())
    names = ("reward_mean", "completion_length_mean", "syntax_rate")
    of_cases = {case: [found[case]["metrics"][name] for name in names] for case in found}
    assert of_cases["run"] == of_cases["untrained"] == [logged[name] for name in names]
    assert of_cases["base"] != of_cases["run"]
    assert found["untrained"]["init_from"] == str(grpo) and found["run"]["init_from"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    ["shppo", *(pytest.param(a, marks=pytest.mark.slow) for a in ("madpo", *SLOW))],
)
def test_every_algorithm_starts_from_a_grpo_run(
    zygote: Zygote, tmp_path: Path, grpo: Path, algorithm: str
) -> None:
    """And keeps to it as its reference: resumed, with the source gone, as undisturbed."""
    source = tmp_path / "source"
    shutil.copytree(grpo, source)
    keys = {"madpo": "madpo.dpo_reference=start", "marlhf": "marlhf.kl_coef=0.1"}
    more = [f"init_from={source}", keys.get(algorithm, f"{algorithm}.kl_coef=0.1")]
    more += [f"{algorithm}.max_steps=2", f"{algorithm}.save_steps=1"]
    folders = [tmp_path / "whole", tmp_path / "parts"]
    zygote.finish(algorithm, [*small_of(algorithm, folders[0]), *more])
    arguments = [*small_of(algorithm, folders[1]), *more]
    run = zygote.run(algorithm, arguments)
    run.until(lambda: newest_step(folders[1]) > 0 or run.code() is not None)
    run.kill()
    run.wait()
    source.rename(tmp_path / "gone")
    zygote.finish(algorithm, [*arguments, "--resume"])
    one, other = weights(folders[0]), weights(folders[1])
    assert one.keys() == other.keys() and any(name.startswith("reference_") for name in one)
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert metrics(folders[0]) == metrics(folders[1])


def test_two_processes_start_alike(zygote: Zygote, tmp_path: Path, grpo: Path) -> None:
    folder = tmp_path / "run"
    arguments = small("magrpo", folder, max_steps=1, kl_coef=0.1, eval_interval=0)
    zygote.finish_team(2, "magrpo", [*arguments, f"init_from={grpo}"])
    assert_in_sync(folder, 2)
    nowhere = small("magrpo", tmp_path / "other", max_steps=1)
    team = zygote.finish_team(2, "magrpo", [*nowhere, "init_from=nowhere"], code=2)
    assert sum("error: init_from: 'nowhere'" in process.output for process in team) == 1
