"""A GGUF file as a model: read, trained, saved, and refused in a line."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from comlrl.config.sections import AgentModelConfig
from comlrl.errors import UserError
from comlrl.models.packed import check_packed
from comlrl.models.pretrained import load_model
from comlrl.preferences.reward_model import classifier
from tests.support.tiny_models import CHAT, write_gguf

FLOAT32 = AgentModelConfig(torch_dtype="float32")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def greedy(model, tokenizer) -> list[int]:
    ids = tokenizer("def f(x):", return_tensors="pt", add_special_tokens=False).input_ids
    return model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


def test_its_weights_are_ordinary_ones(packed, tmp_path):
    import gguf

    model, tokenizer = load_model(FLOAT32, packed, "cpu")
    (stored,) = [t for t in gguf.GGUFReader(packed).tensors if t.name == "blk.1.ffn_up.weight"]
    assert stored.tensor_type == gguf.GGMLQuantizationType.Q4_1
    values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, values)
    assert tokenizer.chat_template == CHAT and tokenizer.eos_token == "<eos>"
    # What the folder holds is the same model, as transformers reads either.
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, own = load_model(FLOAT32, str(tmp_path), "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path.parent.parent, gguf_file=packed, dtype=torch.float32
    )
    assert greedy(again, own) == greedy(model, tokenizer) == greedy(theirs, tokenizer)
    assert again.config.to_dict().get("quantization_config") is None


def test_a_reward_model_starts_from_it(packed):
    model = classifier(packed, torch.float32)
    assert isinstance(model, type(AutoModelForSequenceClassification.from_config(model.config)))
    base, _ = load_model(FLOAT32, packed, "cpu")
    assert torch.equal(model.model.embed_tokens.weight, base.model.embed_tokens.weight)


def test_what_cannot_be_read_is_refused_in_a_line(packed, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=r"^agents: 'no\.gguf' does not exist; give a GGUF file"):
        check_packed("agents", "no.gguf")
    (tmp_path / "bad.gguf").write_text("no model")
    with pytest.raises(UserError, match=r"bad\.gguf' cannot be loaded: "):
        load_model(FLOAT32, str(tmp_path / "bad.gguf"), "cpu")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package gguf; pip install 'comlrl\[gguf\]'$"):
        load_model(FLOAT32, packed, "cpu")
