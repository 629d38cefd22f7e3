"""Untrained teams: who reads what, on samplers and rewards that write down what they were asked."""

from __future__ import annotations

from comlrl.evaluation import baselines
from comlrl.evaluation.estimates import evaluate, repeat
from comlrl.rollout.grow import Rollout
from comlrl.tasks.prompts import plain_text
from comlrl.types import Shape
from tests.support.fakes import (
    PROMPTS,
    SAMPLING,
    SEED,
    FakeReward,
    FakeSampler,
    FakeTransition,
    task,
)

TASKS = [task("A"), task("B")]


def _rollout(sampler: FakeSampler | None = None) -> Rollout:
    reward = FakeReward(lambda name, path, generations: 1.0 + (name == "B"))
    return Rollout(
        sampler or FakeSampler(), reward, FakeTransition(), PROMPTS, seed=SEED,
        process=lambda value: value - 1,
    )  # fmt: skip


def _read(tree, node: int) -> list[str]:
    """What each agent read at a node, as one text."""
    return [plain_text(turn.prompt) for turn in tree.nodes[node].agents_N]


def _wrote(tree, node: int) -> list[str]:
    return [turn.completions_G[0].text for turn in tree.nodes[node].agents_N]


def test_single_asks_one_agent_for_the_whole_program():
    trees = repeat(baselines.build("single", _rollout(), 2, SAMPLING), TASKS)
    assert [len(tree.nodes[0].agents_N) for tree in trees] == [1, 1]
    assert "aux" not in _read(trees[0], 0)[0]


def test_naive_concat_is_the_first_turn_of_the_untrained_team():
    trees = repeat(baselines.build("naive_concat", _rollout(), 2, SAMPLING), TASKS, samples=3)
    assert trees == evaluate(_rollout(), TASKS, Shape(2, 1, 4), SAMPLING, samples=3)


def test_sequential_shows_each_agent_what_those_before_it_wrote():
    sampler = FakeSampler()
    tree, _ = repeat(baselines.build("sequential", _rollout(sampler), 3, SAMPLING), TASKS)
    team = tree.team(2, 0)
    aux, aux2, main = (plain_text(turn.prompt) for turn, _ in team)
    wrote = [completion.text for _, completion in team]
    assert aux == plain_text_of(PROMPTS.first(TASKS[0], 3)[0])
    shown = [f"`{name}`, as it was written" for name in ("aux", "aux2")]
    assert shown[0] in aux2 and wrote[0] in aux2 and wrote[2] not in aux2 and shown[1] not in aux2
    assert all(text in main for text in (*shown, *wrote[:2]))
    assert sampler.calls == [[2, 0, 0], [0, 2, 0], [0, 0, 2]]  # one call an agent, for both tasks


def test_sequential_scores_one_joint_action_and_processes_its_reward():
    trees = repeat(baselines.build("sequential", _rollout(), 2, SAMPLING), TASKS)
    assert [tree.nodes[-1].scores_K[0].value for tree in trees] == [1.0, 2.0]
    assert [[n.rewards_K for n in tree.nodes] for tree in trees] == [[(), (0.0,)], [(), (1.0,)]]


def test_sequential_draws_the_same_whatever_stands_beside_a_task():
    grow = baselines.build("sequential", _rollout(), 2, SAMPLING)
    key = ("eval", 0)
    assert grow(TASKS, [key] * len(TASKS))[1] == grow(TASKS[1:], [key])[0]


def test_discussion_shows_the_drafts_of_the_others_once():
    tree, _ = repeat(baselines.build("discussion", _rollout(), 3, SAMPLING), TASKS)
    assert [node.turn for node in tree.nodes] == [1, 2]
    drafts, prompts = _wrote(tree, 0), [turn.prompt[-1].content for turn in tree.nodes[1].agents_N]
    for i, text in enumerate(prompts):
        assert [draft in text for draft in drafts] == [j != i for j in range(3)]
    assert "a revised `f`" in prompts[2] and "a revised `aux2`" in prompts[1]
    # The agent's own draft is its own past answer, not feedback.
    assert tree.nodes[1].agents_N[2].prompt[-2].content == drafts[2]
    assert "feedback" not in "".join(prompts)  # the external mode is not used


def plain_text_of(text: str) -> str:
    return text.rstrip("\n") + "\n"
