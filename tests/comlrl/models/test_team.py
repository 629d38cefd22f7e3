"""The agents: what is held once, what is trained, what is saved, and who reads what."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.errors import UserError
from comlrl.models.pretrained import build_team
from comlrl.models.team import Team
from comlrl.rollout.generation import Generator
from comlrl.trainers.launch.wiring.weights import locate, read_weights
from comlrl.types import Message, Request, Sampling
from tests.support.runs import state
from tests.support.tiny_models import EOS, PAD, STOPS, config, folder, prompt, team

IDS = torch.tensor([prompt("def f(x): return x")])


@torch.no_grad()
def logits(agents: Team, index: int, reference: bool = False) -> torch.Tensor:
    with (agents.reference if reference else agents.acting)(index) as agent:
        return agent.logits(agent.hidden(input_ids=IDS))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def built(kind: str = "qwen2", *, reference: bool = False, **settings) -> Team:
    return build_team(
        config(agent_model__name=str(folder(kind)), **settings), reference=reference, device="cpu"
    )


def test_agents_whose_reference_switches_adapters_for_all_threads_are_updated_in_turn():
    """GPT-2's layers have no router, also if each agent has a separate model."""
    alone = {"agents": [str(folder("gpt2"))] * 2}
    assert not team("gpt2", **alone).run_parallel
    assert team("gpt2", **alone, lora__enabled=False).run_parallel
    assert team(agents=[str(folder("qwen2"))] * 2).run_parallel and team().run_parallel


# ------------------------------------------------------------------------------- what is held


def test_homogeneous_agents_share_one_base():
    agents = team(num_agents=3)
    assert agents.shared_base and len(agents) == 3
    assert len({id(agent.model) for agent in agents.agents}) == 1
    plain = AutoModelForCausalLM.from_pretrained(folder("qwen2"))
    base = sum(p.numel() for p in plain.parameters())
    # r (in + out) for each of seven projections and two layers; widths 32, 16 (keys, values), 48.
    widths = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    adapter = 16 * widths * 2
    assert sum(p.numel() for p in agents.agents[0].model.parameters()) == base + 3 * adapter
    own = [{id(p) for p in agent.parameters()} for agent in agents.agents]
    assert not own[0] & own[1] and not own[1] & own[2]
    for agent in agents.agents:
        assert sum(p.numel() for p in agent.parameters()) == adapter
    trained = {id(p) for p in agents.agents[0].model.parameters() if p.requires_grad}
    assert trained == set.union(*own)  # the base is frozen


def test_a_new_team_says_what_its_base_says():
    plain = AutoModelForCausalLM.from_pretrained(folder("qwen2"), dtype=torch.float64)
    agents = built(agent_model__torch_dtype="float64")
    with torch.no_grad():
        expected = plain(IDS).logits
    for index in range(2):
        assert torch.allclose(logits(agents, index), expected, atol=1e-5)


def test_adapters_of_a_coarse_base_are_float32():
    agents = built(agent_model__torch_dtype="bfloat16")
    assert agents.agents[0].model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert {p.dtype for p in agents.agents[1].parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("cpu", "fast"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False}, False),
        ({"architecture": "arm64"}, False),
    ],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_weights_have_the_precision_that_their_cpu_is_fast_at(cpu, fast, frozen, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: cpu)
    agent = built(agent_model__torch_dtype="auto", lora__enabled=frozen).agents[0]
    expected = torch.bfloat16 if fast else torch.float32
    assert agent.model.get_output_embeddings().weight.dtype == expected


@pytest.mark.parametrize(
    ("kind", "asked", "taken"),
    [("qwen2", "auto", "sdpa"), ("qwen2", "eager", "eager"),
     ("gemma2", "auto", "eager"), ("gemma2", "eager", "eager")],
)  # fmt: skip
def test_attention_is_one_that_serves_the_model(kind, asked, taken):
    """Gemma 2 caps its attention's scores, which sdpa cannot."""
    keys = {"agent_model__name": str(folder(kind)), "agent_model__torch_dtype": "float32"}
    agents = build_team(config(**keys, agent_model__attn_implementation=asked), device="cpu")
    model = agents.agents[0].model
    assert model.config._attn_implementation == taken
    with agents.reference(0), torch.no_grad():
        given = model(IDS).logits
        if kind == "gemma2":
            for layer in model.get_decoder().layers:
                layer.self_attn.attn_logit_softcapping = None
            assert not torch.allclose(given, model(IDS).logits, atol=1e-3)


def test_all_weights_are_those_of_separate_copies():
    agents = built(lora__enabled=False)
    assert not agents.shared_base and agents.agents[0].peft is None
    first, second = (agent.model for agent in agents.agents)
    assert first is not second
    count = sum(p.numel() for p in first.parameters())
    for agent in agents.agents:
        assert sum(p.numel() for p in agent.parameters()) == count
        assert all(p.requires_grad for p in agent.parameters())
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().max() > 0


def test_agents_of_two_kinds_read_with_their_own_tokenizers():
    one, other = folder("qwen2"), folder("gpt2", upper=True)
    agents = build_team(config(agents=[str(one), str(other)]), device="cpu")
    assert [type(a.model).__name__ for a in agents.agents] == [
        "Qwen2ForCausalLM",
        "GPT2LMHeadModel",
    ]
    messages = (Message("user", "abc"),)
    ids = [agent.encode(messages) for agent in agents.agents]
    assert ids[0] != ids[1]
    for agent, own in zip(agents.agents, ids, strict=True):
        assert agent.decode(own) == "abc\n"
        assert all(
            f".{agent.adapter}." in n for n, _ in agent.peft.named_parameters() if "lora_" in n
        )
    done = Generator(agents).sample(
        [[Request(tuple(own), ((i, 0), (i, 1)))] for i, own in enumerate(ids)], Sampling(1.0, 4)
    )
    assert [len(group) for of_agent in done for group in of_agent] == [2, 2]


# --------------------------------------------------------------------- whose gradient, whose turn


def test_only_the_acting_agent_has_a_gradient():
    agents = team(num_agents=3)
    for index in (1, 0, 2, 1):
        with agents.acting(index) as agent:
            agent.logits(agent.hidden(input_ids=IDS)).square().mean().backward()
        for other in agents.agents:
            have = [p.grad is not None for p in other.parameters()]
            assert all(have) if other.index == index else not any(have)
            assert all(p.requires_grad for p in other.parameters())
            for parameter in other.parameters():
                parameter.grad = None


def test_agents_take_turns_without_a_trace():
    agents = team()
    first, second, base = logits(agents, 0), logits(agents, 1), logits(agents, 0, reference=True)
    assert not torch.allclose(first, second) and not torch.allclose(first, base)
    assert torch.equal(logits(agents, 1, reference=True), base)
    with agents.acting(0):
        with agents.reference(0):
            assert torch.equal(logits(agents, 0, reference=True), base)
        assert torch.equal(logits(agents, 0), first)
    assert torch.equal(logits(agents, 1), second)


def test_the_reference_of_all_weights_is_a_frozen_copy():
    agents = built(lora__enabled=False, reference=True)
    before = logits(agents, 0)
    with torch.no_grad():
        for parameter in agents.agents[0].parameters():
            parameter.mul_(1.1)
    assert torch.equal(logits(agents, 0, reference=True), before)
    assert not torch.allclose(logits(agents, 0), before)
    with agents.reference(0) as reference:
        assert not any(p.requires_grad for p in reference.model.parameters())
    with (
        pytest.raises(RuntimeError, match="reference=True"),
        built(lora__enabled=False).reference(0),
    ):
        pass


@pytest.mark.parametrize("keys", [{}, {"kind": "gpt2"}, {"dtype": "float32"},
                                  {"lora__enabled": False}], ids=str)  # fmt: skip
def test_sampling_leaves_every_weight_bit_for_bit(keys):
    agents = team(**keys)
    before = [weights(agent.model) for agent in agents.agents]
    logits_before = [logits(agents, index) for index in range(2)]
    asked = [[Request(prompt("a"), ((agent, 1), (agent, 2)))] for agent in range(2)]
    Generator(agents).sample(asked, Sampling(1.0, 6))
    for agent, old, logit in zip(agents.agents, before, logits_before, strict=True):
        for name, value in agent.model.state_dict().items():
            assert torch.equal(value, old[name]), name
        assert torch.equal(logits(agents, agent.index), logit)
        assert agent.model.config._attn_implementation == "sdpa"


# ------------------------------------------------------------------------------ save and load


def test_an_adapter_loads_with_pefts_own_from_pretrained(tmp_path):
    agents = team(dtype="float32")
    agents.save(tmp_path)
    for index in range(2):
        base = AutoModelForCausalLM.from_pretrained(folder("qwen2"), dtype=torch.float32)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / f"agent_{index}"))
        with torch.no_grad():
            assert torch.allclose(loaded(IDS).logits, logits(agents, index), atol=1e-4)
        settings = json.loads((tmp_path / f"agent_{index}" / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (16, 32)
        read = AutoTokenizer.from_pretrained(tmp_path / f"agent_{index}")
        assert read("abc")["input_ids"] == list(prompt("abc"))


def test_all_weights_load_with_transformers_own_from_pretrained(tmp_path):
    agents = built(lora__enabled=False)
    with torch.no_grad():
        next(agents.agents[1].model.parameters()).mul_(1.5)
    agents.save(tmp_path)
    for index in range(2):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"agent_{index}")
        with torch.no_grad():
            assert torch.allclose(loaded(IDS).logits, logits(agents, index), atol=1e-6)


@pytest.mark.parametrize("keys", [{}, {"lora__enabled": False}], ids=str)
def test_a_team_takes_back_what_it_saved(keys, tmp_path):
    agents, other = team(**keys), team(**keys)
    with torch.no_grad():
        for agent in other.agents:
            for parameter in agent.parameters():
                parameter.normal_()
    agents.save(tmp_path)
    other.load_tensors(read_weights(locate(tmp_path)))
    for index in range(2):
        assert torch.equal(logits(other, index), logits(agents, index))
    for agent in other.agents:
        for parameter in agent.parameters():
            parameter.data.zero_()
    other.load_tensors(state(agents))
    for index in range(2):
        assert torch.equal(logits(other, index), logits(agents, index))


def test_weights_of_another_team_are_refused(tmp_path):
    team("gpt2").save(tmp_path)
    with pytest.raises(UserError, match="agent_0"):
        team("qwen2").load_tensors(read_weights(locate(tmp_path)))
    adapter = team("qwen2").agents[0].state_tensors()
    for wrong in ({"more": torch.ones(1)}, {next(iter(adapter)): torch.ones(1)}):
        with pytest.raises(UserError, match="agent_0: holds other weights"):
            team("qwen2").load_tensors({f"agent_{i}": adapter | wrong for i in range(2)})


def test_saved_files_are_small_and_safe(tmp_path):
    agents = team()
    agents.save(tmp_path)
    for index in range(2):
        files = {file.name for file in (tmp_path / f"agent_{index}").iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
        assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in files)
        saved = load_file(str(tmp_path / f"agent_{index}" / "adapter_model.safetensors"))
        own = agents.agents[index].parameters()
        assert sum(v.numel() for v in saved.values()) == sum(p.numel() for p in own)


# ------------------------------------------------------------------------------------ reading


def test_a_chat_model_reads_its_template_and_a_base_model_plain_text():
    messages = (Message("user", "abc"), Message("assistant", "d"), Message("user", "e"))
    chat = build_team(config(agent_model__name=str(folder("llama", chat=True))), device="cpu")
    plain = build_team(config(agent_model__name=str(folder("llama"))), device="cpu")
    assert plain.agents[0].decode(plain.agents[0].encode(messages)) == "abc\n\nd\n\ne\n"
    assert (
        chat.agents[0].decode(chat.agents[0].encode(messages))
        == "<user>abc</><assistant>d</><user>e</><assistant>"
    )
    begun = (*messages, Message("assistant", "def f("))  # is left open
    assert plain.agents[0].decode(plain.agents[0].encode(begun)) == "abc\n\nd\n\ne\n\ndef f("
    assert (
        chat.agents[0].decode(chat.agents[0].encode(begun))
        == "<user>abc</><assistant>d</><user>e</><assistant>def f("
    )


def test_completions_stop_at_the_tokenizers_end_and_the_models_own():
    agent = team().agents[0]
    assert agent.stop_ids[0] == EOS
    assert set(agent.stop_ids) == set(STOPS)
    assert agent.context_length == 512
    assert agent.tokenizer.pad_token_id == PAD


def test_special_tokens_are_added():
    given = {"pad_token": "<nothing>", "eos_token": "<end>"}
    agent = build_team(
        config(agent_model__name=str(folder("llama")), agent_model__special_tokens=given),
        device="cpu",
    ).agents[0]
    assert (agent.tokenizer.pad_token, agent.tokenizer.eos_token) == ("<nothing>", "<end>")
    assert max(agent.stop_ids) < agent.model.get_input_embeddings().weight.shape[0]


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"agent_model__name": "builtin:huge-coder"}, "builtin:huge-coder"),
        ({"agent_model__name": "/nowhere/model"}, "/nowhere/model"),
        ({"agents": ["/nowhere/a", "/nowhere/b"]}, "/nowhere/a"),
        (
            {
                "agent_model__name": str(folder("gemma2")),
                "agent_model__attn_implementation": "sdpa",
            },
            "agent_model.attn_implementation",
        ),
        ({"lora__target_modules": ["nothing_proj"]}, "lora.target_modules"),
    ],
)
def test_what_cannot_be_built_is_named_in_one_line(settings, named):
    settings = {"agent_model__name": str(folder("qwen2"))} | settings
    with pytest.raises(UserError) as error:
        build_team(config(**settings), device="cpu")
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    import shutil

    shutil.copytree(folder("llama"), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="eos_token"):
        build_team(config(agent_model__name=str(tmp_path / "model")), device="cpu")
