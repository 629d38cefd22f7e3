"""Several turns in whole runs: what is counted, what is weighted, and teams of three."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comlrl.evaluation.metrics import tree_metrics
from comlrl.rewards.code.domain import CODE
from comlrl.rollout.vllm.processes import free_port
from comlrl.types import Message, Shape
from tests.support.grown import Grown
from tests.support.made_runs import agent_turn, node, tree
from tests.support.runs import ROOT, metrics
from tests.support.tiny_trainers import build, share_of_letters

CONFIG = ROOT / "configs" / "mt_magrpo_quickstart.yaml"


def small(folder: Path, **keys: object) -> list[str]:
    """Arguments for the two-turn quickstart in seconds."""
    settings = {
        "output.dir": str(folder), "dataset.train_split": "train[:2]", "lora.r": 4,
        "magrpo.batch_size": 2, "magrpo.num_generations": 2, "magrpo.eval_num_samples": 2,
        "magrpo.max_new_tokens": 24, "magrpo.max_steps": 2, "magrpo.eval_interval": 2,
    }  # fmt: skip
    settings |= {name.replace("__", "."): value for name, value in keys.items()}
    overrides = (f"{key}={json.dumps(value)}" for key, value in settings.items())
    return ["--config", str(CONFIG), "--override", *overrides]


# ------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("mode", "handoff", "expected"),
    [("align", None, 12), ("align", "random", 8), ("cross", None, 40), ("cross", "best", 16)],
)
def test_a_training_step_counts_scored_joint_actions(mode, handoff, expected, tmp_path):
    # As in test_grow, where the products are; here through a trainer and its log.
    trainer = build(
        "magrpo", tmp_path, share_of_letters, num_turns=2, num_generations=2, joint_mode=mode,
        handoff=handoff, max_steps=1,
    )  # fmt: skip
    trainer.train()
    counters = trainer.loop.counters
    assert counters.env_steps == counters.scored_joint_actions == expected
    assert trainer.rollout.reward.scored == expected
    assert [record.step for record in trainer.loop.logger.records] == [expected]


def test_prompts_that_lost_old_turns_are_counted():
    # The root's prompts are whole. Agent 0 lost a turn at one of two nodes of turn 2.
    cut = agent_turn(["a", "b"])
    cut = type(cut)(cut.prompt, cut.prompt_ids, cut.completions_G, turns_dropped=1)
    whole = agent_turn(["a", "b"])
    found = tree_metrics(
        [
            tree(
                node([0.0, 0.0], agents=[whole, whole]),
                node([0.0, 0.0], agents=[cut, whole], turn=2, parent=0, parent_action=0),
                node([0.0, 0.0], agents=[whole, whole], turn=2, parent=0, parent_action=1),
            )
        ],
        CODE,
    )
    assert found["agent_0/history_dropped_share"] == 0.5
    assert found["agent_1/history_dropped_share"] == 0.0
    assert found["turn_1/history_dropped_share"] == 0.0
    assert found["turn_2/history_dropped_share"] == 0.25


def test_a_shortened_tree_says_so_in_its_metrics():
    full = Grown(Shape(2, 3, 2, joint_mode="align", handoff="best")).trees
    assert tree_metrics(full, CODE)["history_dropped_share"] == 0.0
    longest = len(full[0].nodes[2].agents_N[0].prompt_ids)
    cut = Grown(
        Shape(2, 3, 2, joint_mode="align", handoff="best"), max_length=longest + 7
    ).trees  # one short
    assert tree_metrics(cut, CODE)["turn_2/history_dropped_share"] == 0.0
    assert tree_metrics(cut, CODE)["turn_3/history_dropped_share"] > 0.0
    # What was left out are old turns: the newest response is whole in every prompt.
    for agent in range(2):
        messages = full[0].nodes[2].agents_N[agent].prompt[-2:]
        assert cut[0].nodes[2].agents_N[agent].prompt[-2:] == messages
        assert messages[0] == Message("assistant", f"A|0|{agent}|0")


# ------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("algorithm", ["magrpo", "ppo", "shppo"])
def test_turns_without_weight_teach_nothing(algorithm, tmp_path):
    def moved(name: str, weights: list[float] | None) -> float:
        trainer = build(
            algorithm, tmp_path / name, share_of_letters, num_turns=2, max_steps=1,
            turn_gradient_weights=weights, learning_rate=1e-2,
        )  # fmt: skip
        parameters = list(trainer.team.agents[0].parameters())
        before = [p.detach().clone() for p in parameters]
        trainer.train()
        return sum(
            float((p.detach() - b).abs().sum()) for p, b in zip(parameters, before, strict=True)
        )

    assert moved("none", [0.0, 0.0]) == 0.0
    assert moved("second", [0.0, 1.0]) > 0.0
    assert moved("all", None) == moved("ones", [1.0, 1.0]) > 0.0


# --------------------------------------------------------------------------------- whole runs


def test_a_team_of_three_trains_on_two_turns(zygote, tmp_path):
    run = tmp_path / "run"
    argv = small(run, magrpo__num_agents=3, output__verbose=True, output__save_final_model=True)
    zygote.finish("magrpo", argv)
    records = metrics(run)
    # 2 tasks · (2 + 2) joint actions: one of the first turn's is handed on.
    assert [r["step"] for r in records if r["phase"] == "train"] == [8, 16]
    for record in records:
        for turn in (1, 2):
            assert 0.0 <= record["metrics"][f"turn_{turn}/reward_mean"] <= 4.0
        assert {f"agent_{i}/completion_length_mean" for i in range(3)} <= set(record["metrics"])
        assert "agent_3/completion_length_mean" not in record["metrics"]
    assert sorted(path.name for path in (run / "final_model").glob("agent_*")) == [
        "agent_0", "agent_1", "agent_2",
    ]  # fmt: skip
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    text = json.dumps(episodes)
    # Each helper reads its own name, main all of them; at turn 2 each is to revise its own.
    assert "Write one helper function `aux2`" in text
    assert "`aux(...)` and `aux2(...)` exist" in text
    assert "Write a revised `aux2`, code only" in text


@pytest.mark.slow
def test_what_the_expert_did_not_answer_is_counted_in_training_too(zygote, tmp_path):
    run = tmp_path / "run"
    argv = small(
        run, external__mode="expert_edits", external__on_error="plain", magrpo__max_steps=1,
        external__expert_base_url=f"http://127.0.0.1:{free_port()}/v1",
        external__expert_model="tiny", magrpo__eval_interval=0, output__save_final_model=False,
    )  # fmt: skip
    zygote.finish("magrpo", argv)
    (record,) = metrics(run)
    assert record["metrics"]["expert_fallbacks"] == 2  # one attempt of each task is handed on


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_second_attempt_ends_above_one_attempt(zygote, tmp_path):
    run = tmp_path / "run"
    settings = {"output.dir": str(run), "output.save_final_model": False, "magrpo.max_steps": 24}
    overrides = (f"{key}={json.dumps(value)}" for key, value in settings.items())
    zygote.finish("magrpo", ["--config", str(CONFIG), "--override", *overrides], seconds=1200)
    first, *_, end = [r["metrics"] for r in metrics(run) if r["phase"] == "eval"]
    # What is solved at once ends there: the bare reward is that of each task's last attempt.
    assert end["reward_mean"] > end["turn_1/reward_mean"] + 0.1
    assert end["turn_1/reward_mean"] > first["reward_mean"]
