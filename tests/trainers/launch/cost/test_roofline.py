"""``--hardware``: the estimate's arithmetic by hand, sizes against real models, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from comlrl.builtin import TINY_CODER
from comlrl.errors import UserError
from tests.support.runs import SHIPPED, load
from tests.support.tiny_models import config
from trainers.launch.checks.relations import validate
from trainers.launch.commands.train import main
from trainers.launch.cost.model_size import Dims, ModelSize, model_size
from trainers.launch.cost.roofline import (
    DECODING,
    LEARNING,
    Hardware,
    StepCost,
    estimate,
    hardware,
)
from trainers.launch.wiring.sampling_settings import limits

ROOT = Path(__file__).parents[4]
# 10 · (2 · 10 + 2 · 5) + 3 · 10 · 20 = 900 weights a layer, 2 layers; a head of 10 · 100
DIMS = Dims(layers=2, width=10, inner=20, heads=10, kv=5, vocabulary=100)
MODEL = ModelSize(DIMS.parameters, "by hand", DIMS, {})
# Products cost nothing, or memory does, or a single operation: one at a time.
URL = "http://localhost:8000"
FREE = Hardware(flops=1e30, bandwidth=1e30, memory=1e9, attention=1e30, launch=1e-30, prompt=30)


def step(on: Hardware, **keys) -> StepCost:
    built = config(num_generations=4, max_new_tokens=16, **keys)
    return StepCost(
        config=built, limits_N=(16, 16), section=built.section, model=MODEL, on=on, size=3
    )


def test_sizes():
    assert (DIMS.linear, DIMS.head, DIMS.parameters) == (1800, 1000, 2800)
    found = model_size(str(TINY_CODER)).dims
    counted = model_size("builtin:tiny-coder")
    assert found.parameters == pytest.approx(counted.parameters, rel=0.01)  # norms and biases
    assert found.cache == counted.cache
    assert step(FREE).trained == 2 * counted_adapter(DIMS)


def test_adapters_are_those_of_the_target_modules():
    given = {"lora__target_modules": ["q_proj", "down_proj"]}
    # r = 16 on 2 layers: q has 10 inputs and 10 outputs, down 20 and 10; 2 agents
    assert step(FREE, **given).trained == 2 * 16 * 2 * (20 + 30)
    other = config(agent_model__name="none/a-3B", lora__target_modules=["mixer"])
    with pytest.raises(UserError, match=r"lora\.target_modules: \['mixer'\] with --hardware"):
        estimate(other, (16, 16), "h100")


def test_a_feed_forward_part_of_two_matrices(tmp_path):
    """As GPT-2's: 4 · 10 · 10 + 2 · 10 · 40 = 1,200 weights a layer."""
    sizes = {"n_embd": 10, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    dims = model_size(str(tmp_path)).dims
    assert (dims.linear, dims.left) == (2400, 2 * (8 * 10 + 3 * 40))


def counted_adapter(dims: Dims) -> int:
    """r = 16 on q, k, v, o, gate, up and down: r · Σ (inputs + outputs)."""
    w, i, kv = dims.width, dims.inner, dims.kv
    return 16 * dims.layers * ((w + w) * 2 + (w + kv) * 2 + (w + i) * 3)


@pytest.mark.parametrize("name", ["a-1.5B", "b-3B", "c-7B", "d-14B", "e-32B"])
def test_a_size_in_a_name_is_a_decoder_of_about_that_size(name):
    found = model_size(f"none/{name}").dims
    assert found.guessed
    assert found.parameters == pytest.approx(model_size(name).parameters, rel=0.25)


def test_generation_by_hand():
    """3 tasks, 2 agents on one base, G = 4: 6 prompts of 30 tokens, 24 rows of 16."""
    products = step(replace(FREE, flops=1.0))
    assert products.generation() == 2 * 2800 * 24 * 16 + 2 * 1800 * 6 * 30
    launch = step(replace(FREE, launch=1.0))
    assert launch.generation() == pytest.approx(17 * 2 * DECODING)  # a prefill and 16 tokens
    engine = step(replace(FREE, launch=1.0), generation__backend="vllm", generation__vllm_url=URL)
    assert engine.generation() < 1
    # In bfloat16: all weights for each of 16 tokens; keys of the prompts, and on average half of
    # a row's own; what layers leave; and 24 bytes for each word of the vocabulary.
    memory = step(replace(FREE, bandwidth=1.0), agent_model__torch_dtype="bfloat16")
    keys = 16 * (6 * 30 + 24 * 8) * 2 * 2 * 5
    left = 2 * (8 * 10 + 3 * 20) * 24 * 16
    assert memory.generation() == 2 * (16 * 2800 + keys + left) + 24 * 100 * 24 * 16
    # Agents with their own bases decode one after the other: 12 rows each.
    alone = step(replace(FREE, launch=1.0), lora__enabled=False)
    assert alone.generation() == pytest.approx(2 * 17 * 2 * DECODING)


def test_update_by_hand():
    """6 rows of a prompt of 30 and 4 · 16 tokens, forward and backward."""
    on, tokens, written = replace(FREE, flops=1.0), 6 * (30 + 64), 6 * 64
    assert step(on).update() == 2 * 1800 * tokens * 2 + 2 * 1000 * written * 2
    weights = step(on, lora__enabled=False)  # and the weights' own gradients
    assert weights.update() == 2 * 1800 * tokens * 3 + 2 * 1000 * written * 3
    reference = step(on, kl_coef=0.1)  # one forward pass more
    assert reference.update() == 2 * 1800 * tokens * 3 + 2 * 1000 * written * 3
    again = step(on, agent_model__gradient_checkpointing=True)
    assert again.update() == 2 * 1800 * tokens * 3 + 2 * 1000 * written * 2
    passes = step(on, update_epochs=3)  # three of both, and the old log-probabilities
    assert passes.update() == 2 * 1800 * tokens * 7 + 2 * 1000 * written * 7
    assert step(replace(FREE, launch=1.0)).update() == pytest.approx(2 * LEARNING)
    # A GPU computes while operations are started, a CPU after it has started each.
    both = {"launch": 1.0, "flops": step(on).update() / (5 * LEARNING)}
    assert step(replace(FREE, **both)).update() == pytest.approx(5 * LEARNING)
    assert step(replace(FREE, **both, word=2)).update() == pytest.approx(7 * LEARNING)
    # On a CPU a row may have 2 · 3,072 tokens: of the four completions, two fit beside this prompt.
    parts = step(replace(on, word=2, prompt=6100))
    assert parts.update() == 2 * 1800 * 6 * (2 * 6100 + 64) * 2 + 2 * 1000 * written * 2


def test_products_of_few_rows_have_a_rate_of_their_own():
    """While tokens are written one at a time, not where prompts are read."""
    on = replace(FREE, flops=1.0, few=0.5)
    assert step(on).generation() == 2 * 2 * 2800 * 24 * 16 + 2 * 1800 * 6 * 30


def test_more_turns_read_more_and_gpus_exchange_gradients():
    on = replace(FREE, flops=1.0)
    one, two = step(on).generation(), step(on, num_turns=2).generation()
    # Turn 2 has 4 nodes a task, whose prompts hold turn 1's answer and the feedback.
    later = 2 * 2800 * 96 * 16 + 2 * 1800 * 24 * (30 + 16 + 100)
    assert two == one + later
    alone = step(replace(FREE, link=1.0))
    assert alone.exchange() == 0
    assert replace(alone, on=replace(alone.on, gpus=8)).exchange() == pytest.approx(
        2 * 7 / 8 * 4 * alone.trained
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v100", ["v100", "h100"]),
        ("8xv100", ["v100"]),
        ("h100,speed=3", ["speed=3", "flops"]),
        ("h100,tokens=many", ["tokens=many"]),
        ("h100,tokens=-1", ["tokens=-1"]),
        ("flops=1e12,memory=1e9", ["bandwidth"]),
    ],
)
def test_hardware_that_is_not_understood_is_refused(text, words):
    with pytest.raises(UserError) as error:
        hardware(text, config())
    assert all(word in str(error.value) for word in ("--hardware", *words))


def test_hardware_by_kind_by_hand_and_measured():
    assert hardware("8xh100,tokens=90", config()).gpus == 8
    assert hardware("h100,cards=8", config()).gpus == 8  # the older name
    assert hardware("h200", config()).memory > hardware("h100", config()).memory
    assert hardware("flops=2e12,bandwidth=3e9,memory=4e9", config()) == Hardware(
        flops=2e12, bandwidth=3e9, memory=4e9
    )
    found = hardware("cpu", config(agent_model__name="builtin:tiny-coder"))
    assert found.flops > 1e8 and found.bandwidth > 1e7 and found.word in (2, 4)


def test_the_command_tells_seconds_and_what_does_not_fit(capsys, tmp_path):
    path = ROOT / "configs/magrpo_quickstart.yaml"
    command = ["--config", str(path), "--override", f"output.base_dir={tmp_path}", "--hardware"]
    assert main("magrpo", lambda run: None, [*command, "8xh100", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for word in ("8 × 593 TFLOP/s", "generation", "reward", "update", "all-reduce", "fits"):
        assert word in out
    small = "flops=1e12,bandwidth=1e10,memory=1e6"
    assert main("magrpo", lambda run: None, [*command, small, "--dry-run"]) == 0
    assert "does NOT fit" in capsys.readouterr().out
    assert main("magrpo", lambda run: None, [*command, "h100"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_model_without_known_sizes_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"d_model": 4}))
    for name in ("someone/nameless", str(tmp_path)):
        with pytest.raises(UserError, match="--hardware"):
            estimate(config(agent_model__name=name), (16, 16), "h100")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_estimated_without_network(path):
    made = load(path)
    text = estimate(made, limits(made, validate(made).roles), "8xh100")
    for word in ("update", "together", "memory of each", "fits"):
        assert word in text
