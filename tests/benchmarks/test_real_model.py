"""What the benchmark of the real model rests on: the same model, which cannot end a completion."""

from __future__ import annotations

import json

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.bench_real_model import make_endless
from benchmarks.real_model_table import Point, points
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


def test_a_round_of_preferences_is_a_point(tmp_path):
    def labelled(index: int, *rewards: float) -> str:
        candidates = [{"reward": r, "token_ids": [[1, 2], [3]]} for r in rewards]
        return json.dumps({"round": index, "candidates": candidates}) + "\n"

    lines = labelled(0, 1.0, 2.0) + labelled(0, 3.0) + labelled(1, 4.0)
    (tmp_path / "preferences.jsonl").write_text(lines)
    first, second = {"preferences/labelled": 3.0}, {"preferences/labelled": 4.0}
    marlhf = [first, *[{"step_seconds": 1.0, "tokens": 10}] * 2, second, {"step_seconds": 2.0}]
    rounds = [
        Point(reward=2.0, tokens=3 * 3 + 20, seconds=2.0), Point(reward=4.0, tokens=3, seconds=2.0),
    ]  # fmt: skip
    assert points(tmp_path, marlhf) == rounds
    madpo = [{"step_seconds": 2.0, "tokens": 20, **first}, {"step_seconds": 2.0, **second}]
    assert points(tmp_path, madpo) == rounds
    stopped = [Point(reward=4.0, tokens=3, seconds=0)]  # after the second round was labelled
    assert points(tmp_path, madpo[:1]) == rounds[:1] + stopped
    assert points(tmp_path, marlhf[:-1]) == rounds[:1] + stopped


def test_a_step_is_a_point_with_its_neighbors(tmp_path):
    train = [{"reward_mean": r, "tokens": 5, "step_seconds": 1.0} for r in (0.0, 3.0, 6.0)]
    assert [point.reward for point in points(tmp_path, train)] == [3.0, 3.0, 3.0]  # of all three
