"""What the benchmark of the real model rests on: the same model, which cannot end a completion."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.bench_real_model import make_endless
from comlrl.builtin import TINY_CODER


def test_an_endless_model_reads_and_weighs_as_before_and_has_no_end(tmp_path):
    make_endless(TINY_CODER, tmp_path)
    ours, before = (AutoTokenizer.from_pretrained(f) for f in (tmp_path, TINY_CODER))
    config = AutoConfig.from_pretrained(tmp_path)
    assert ours.eos_token_id == config.vocab_size and config.eos_token_id is None
    prompt = "def aux(a):\n    return a + 5\n"
    assert ours(prompt)["input_ids"] == before(prompt)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id is None
    weights = AutoModelForCausalLM.from_pretrained(TINY_CODER).state_dict()
    assert all(weight.equal(weights[name]) for name, weight in model.state_dict().items())
