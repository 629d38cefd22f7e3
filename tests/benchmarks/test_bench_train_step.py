"""The benchmark's ratios, by hand."""

from __future__ import annotations

from benchmarks.bench_train_step import ratios_of


def test_ratios_are_to_the_others_faster_form_in_the_same_round():
    rates = {
        "peer, 2 agents, float32": [100.0, 900.0, 300.0],  # median 300
        "peer, 2 agents, bfloat16": [200.0, 400.0, 600.0],  # median 400: the faster form
        "ours, 2 agents, LoRA": [1000.0, 1000.0, 3000.0],
        "TRL GRPO, 1 agent, float32": [10.0, 10.0, 10.0],
        "ours GRPO, 1 agent, LoRA": [50.0, 40.0, 30.0],
    }
    assert ratios_of(rates) == {
        "peer, 2 agents, float32": [0.5, 2.25, 0.5],
        "peer, 2 agents, bfloat16": [1.0, 1.0, 1.0],
        "ours, 2 agents, LoRA": [5.0, 2.5, 5.0],
        "TRL GRPO, 1 agent, float32": [1.0, 1.0, 1.0],
        "ours GRPO, 1 agent, LoRA": [5.0, 4.0, 3.0],
    }
