"""Sampling limits of single agents, from the configuration to what is drawn and estimated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from comlrl.errors import UserError
from comlrl.loggers.tables import evaluation_table
from comlrl.trainers import madpo, ppo
from comlrl.trainers.launch.checks.shipped import CONFIGS
from comlrl.trainers.launch.checks.validation import validate
from comlrl.trainers.launch.commands.evaluation_plan import parse_arguments as evaluation_arguments
from comlrl.trainers.launch.commands.evaluation_plan import resolve as resolve_evaluation
from comlrl.trainers.launch.cost import dry_run
from comlrl.trainers.launch.wiring.sampling_settings import sampling
from comlrl.types import Sampling
from tests.support.fakes import code_task
from tests.support.runs import resolved
from tests.support.tiny_models import STOPS, config
from tests.support.tiny_trainers import build, grown

APART = {"sampling__aux__max_new_tokens": 5, "sampling__aux__temperature": 0.7}
ROLES = ("aux", "main")
QUICKSTART = CONFIGS / "magrpo_quickstart.yaml"


def test_what_a_role_does_not_say_is_the_section_s():
    drawn = sampling(config(**APART, top_p=0.9, temperature=1.2, sampling__main__top_k=8), ROLES)
    assert drawn.by_agent == (Sampling(0.7, 5, 0.9), Sampling(1.2, 16, 0.9, 8))
    assert drawn.for_agent(1) == drawn.by_agent[1] and drawn.longest == 16
    alike = {f"sampling__{role}__max_new_tokens": 5 for role in ("aux", "main")}
    assert sampling(config(**alike), ROLES) == Sampling(1.0, 5)
    assert sampling(config(), ROLES) == Sampling(1.0, 16)  # nothing of it where nobody is named


def test_greedy_evaluations_and_smaller_baselines_keep_each_role_s_limits():
    made = config(**APART, sampling__main__max_new_tokens=9)
    assert [own.temperature for own in sampling(made, ROLES, greedy=True).by_agent] == [0, 0]
    assert [own.max_new_tokens for own in sampling(made, ROLES, greedy=True).by_agent] == [5, 9]
    assert sampling(made, ROLES).greedy.by_agent == (Sampling(0.0, 5), Sampling(0.0, 9))
    assert sampling(made, ("main",)) == Sampling(1.0, 9)  # `single` is main's role


def test_every_way_of_sampling_has_its_stops():
    made = config(agent_model__stop=["```"], sampling__aux__stop=["</answer>", "\n\n"])
    both = [("</answer>", "\n\n"), ("```",)]
    for drawn in (sampling(made, ROLES), sampling(made, ROLES, greedy=True)):
        assert [own.stop for own in drawn.by_agent] == both
        assert [own.stop for own in drawn.greedy.by_agent] == both
        assert [own.stop for own in drawn.with_sets(8).by_agent] == both
    assert sampling(config(agent_model__stop=["x"]), ROLES) == Sampling(1.0, 16, stop=("x",))
    none = config(agent_model__stop=["x"], sampling__aux__stop=[])  # aux has none
    assert [own.stop for own in sampling(none, ROLES).by_agent] == [(), ("x",)]
    config("shppo", sampling__aux__stop=["x"])  # where agents share a policy, too


@pytest.mark.parametrize("stops", ["['']", r'["\ud800"]', "[[a]]", "x", "[null]"])
@pytest.mark.parametrize("key", ["agent_model.stop", "sampling.aux.stop"])
def test_stops_that_no_model_can_write_are_refused(key, stops):
    with pytest.raises(UserError, match=key.replace(".", r"\.")) as refused:
        resolved(QUICKSTART, f"{key}={stops}")
    assert "\n" not in str(refused.value)


def test_a_configuration_that_is_written_reads_back(tmp_path):
    made = config(**APART, sampling__aux__stop=["```"], agent_model__stop=["\n\n"])
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(made.to_dict()))
    assert resolved(written)[0].sampling == made.sampling
    asked = evaluation_arguments(["--config", str(written), "--override", "sampling.aux=null"])
    assert resolve_evaluation(str(written), [], asked)[0].sampling == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("sampling.axu.temperature=1", "sampling.axu: no agent has this role; did you mean `aux`?"),
        ("sampling.aux.max_tokens=5", "sampling.aux.max_tokens: .* did you mean `max_new_tokens`?"),
        ("sampling.aux.max_new_tokens=0", "max_new_tokens: 0; use a number at least 1"),
        ("sampling.aux.max_new_tokens=2.5", "sampling.aux.max_new_tokens: 2.5 .* a whole number"),
        ("sampling.aux.temperature=warm", "sampling.aux.temperature: 'warm' .* a number"),
        ("sampling.aux.temperature=0", "sampling.aux.temperature: 0.*; use a number above 0"),
        ("sampling.aux.top_p=1.5", "sampling.aux.top_p: 1.5; use a number above 0 and at most 1"),
        ("sampling.main.top_k=0", "sampling.main.top_k: 0; use a number at least 1"),
        ("sampling.aux=5", "sampling.aux: 5 is not a mapping; write sampling.aux.KEY=VALUE"),
        ("sampling.main.max_new_tokens=4096", "sampling.main.max_new_tokens: 4096 leaves no room"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(settings, message):
    with pytest.raises(UserError, match=message) as refused:
        resolved(QUICKSTART, settings)
    assert "\n" not in str(refused.value)


def test_a_limit_that_no_agent_has_needs_no_room():
    settings = ["agent_model.max_length=200", "magrpo.max_new_tokens=256"]
    each = [f"sampling.{role}.max_new_tokens=8" for role in ("aux", "main")]
    assert resolved(QUICKSTART, *settings, *each)
    with pytest.raises(UserError, match=r"agent_model\.max_length: 200 leaves no room"):
        resolved(QUICKSTART, *settings, each[0])


def test_agents_of_one_policy_may_differ_in_length_alone(tmp_path):
    with pytest.raises(UserError, match=r"sampling\.aux\.temperature: 0\.7 with shppo"):
        config("shppo", **APART)
    trainer = build("shppo", tmp_path, lambda texts: 1.0, sampling__aux__max_new_tokens=3)
    first, second = lengths(grown(trainer))
    assert max(first) == 3 < max(second) <= 16


def lengths(trees) -> list[list[int]]:
    """Tokens of each agent's completions; those that do not stop by themselves are cut."""
    found: list[list[int]] = [[], []]
    for node in (node for tree in trees for node in tree.nodes):
        for agent, turn in zip(node.acting, node.agents_N, strict=True):
            for completion in turn.completions_G:
                found[agent].append(len(completion.token_ids))
                assert completion.finished == (completion.token_ids[-1] in STOPS)
    return found


@pytest.mark.parametrize("keys", [{}, {"turn_order": "sequential"}, {"num_turns": 2}], ids=str)
def test_every_agent_stops_at_its_own_limit(tmp_path, keys):
    trainer = build("magrpo", tmp_path, lambda texts: len(texts[0]), **APART, **keys)
    first, second = lengths(grown(trainer))
    assert max(first) == 5 < max(second) <= 16
    trainer.train()
    assert all(0 < m["gradient_norm"] < 1e9 for m in trainer.loop.logger.metrics())


def test_ppo_s_and_madpo_s_log_probabilities_are_at_each_agent_s_temperature(tmp_path, monkeypatch):
    read = set()
    real = ppo.action_logprobs

    def noted(agent, batch, temperature, **more):
        read.add((agent.index, temperature))
        return real(agent, batch, temperature, **more)

    monkeypatch.setattr(ppo, "action_logprobs", noted)
    keys = {"num_agents": 2, "kl_coef": 0.1, "ppo_epochs": 1, **APART}
    trainer = build("ppo", tmp_path, lambda texts: len(texts[0]), **keys)
    trainer.train()
    assert read == {(0, 0.7), (1, 1.0)}
    assert all(m["ratio_max"] == 1 for m in trainer.loop.logger.metrics())
    drawn = madpo.MADPOTrainer.__new__(madpo.MADPOTrainer)
    drawn.sampling = sampling(config("madpo", **APART), ROLES)
    assert [drawn._temperature(i) for i in range(2)] == [0.7, 1.0]


def test_estimates_count_each_agent_s_tokens():
    """A step of 16 tasks, 3 completions of each agent: 16 · 3 · (5 + 16) tokens."""
    made = config(**APART)
    assert sampling(made, ROLES).limits(2) == (5, 16)
    (line,) = [
        t for t in dry_run.describe(made, (5, 16)).split("\n") if t.startswith("sampled tokens")
    ]
    assert line.split()[3] == f"{16 * 3 * (5 + 16):,}"
    madpo_run = dry_run.describe(config("madpo", **APART, preference_num_candidates=4), (5, 16))
    assert "tokens" in madpo_run


def test_a_prompt_has_the_room_that_its_own_agent_leaves():
    from comlrl.trainers.launch.wiring.task_splits import fitting

    def encode(agent, prompt):
        return range((90, 60)[agent])

    task = code_task("t", "def f(x):\n", "def check(f): ...", "f")
    made = config(**APART, sampling__main__max_new_tokens=40)
    assert fitting([task], validate(made), made.dataset, encode, 100, sampling(made, ROLES)) == [
        task
    ]
    made = config(**APART, sampling__main__max_new_tokens=41)
    with pytest.raises(UserError, match=r"a prompt of 60 tokens, with room for 59 .* 41"):
        fitting([task], validate(made), made.dataset, encode, 100, sampling(made, ROLES))


def test_a_task_costs_its_prompts_and_completions_of_full_length():
    from comlrl.trainers.launch.wiring.task_splits import token_bound

    def encode(agent, prompt):
        return range((90, 60)[agent] + prompt[0].content.count("long"))

    made = config(**APART, sampling__main__max_new_tokens=40)
    sampled, shape = sampling(made, ROLES), made.section.shape
    written = sum(shape.num_generations * sampled.for_agent(i).max_new_tokens for i in range(2))
    cost = token_bound(validate(made), encode, shape, sampled)
    short, long = (code_task("t", f"def {n}(x):\n", "def check(f): ...", n) for n in ("f", "long"))
    assert cost(short) == written + 150 < cost(long)


def test_a_prompt_has_room_for_its_prefill():
    from comlrl.trainers.launch.wiring.task_splits import fitting

    def encode(agent, prompt):
        return range(len(prompt[-1].content) if prompt[-1].role == "assistant" else 0)

    task = code_task("t", "def f(x):\n", "def check(f): ...", "f")
    made = replace(config(**APART), prompts={"prefill": 101 * "x"})
    with pytest.raises(UserError, match="a prompt of 101 tokens"):
        fitting([task], validate(made), made.dataset, encode, 100, sampling(made, ROLES))


def test_tables_of_evaluations_tell_who_sampled_otherwise():
    result = {
        "baseline": None, "checkpoint": "run", "model": "m", "tasks": 1, "dataset": "d",
        "split": "eval", "samples": 1, "num_agents": 2, "num_turns": 1, "seed": 1,
        "turn_order": "simultaneous", "roles": ["aux", "main"], "metrics": {}, "intervals": {},
        "budget": {},
        "sampling": {"temperature": 1.0, "top_p": None, "top_k": None},
        "settings": {"domain": "code", "sampling": {"aux": {"max_new_tokens": 5, "top_p": None}}},
    }  # fmt: skip
    assert "temperature 1.0, aux: max_new_tokens 5, seed 1." in evaluation_table(result)
    agents = {"aux": {"sampling": None}, "main": {"sampling": {"top_k": 3}}}
    result["settings"] = {"domain": "code", "sampling": {}, "agents": agents}
    assert "temperature 1.0, main: top_k 3, seed 1." in evaluation_table(result)
    result["settings"] = {"domain": "code", "agents": ["some/model", "another/model"]}
    assert "temperature 1.0, seed 1." in evaluation_table(result)
