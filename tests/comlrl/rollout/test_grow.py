"""Trees grown with a fake model and reward: counts, structure, prompts, handoff, termination."""

from __future__ import annotations

import itertools
import math
import string

import pytest

from comlrl.keyed import uniforms
from comlrl.rewards.code.domain import CODE
from comlrl.rollout.grow import Rollout
from comlrl.rollout.reading import History
from comlrl.tasks.history import PromptTooLongError
from comlrl.tasks.prompts import Prompts
from comlrl.types import Message, Score, Shape
from tests.support.fakes import (
    PROMPTS,
    SAMPLING,
    SEED,
    FakeReward,
    FakeSampler,
    FakeTransition,
    parts,
    task,
)
from tests.support.grown import KEY, Grown, places

# ------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("mode", "handoff", "expected"),
    [
        ("align", None, 12),  # 2 tasks · (2 + 2 · 2)
        ("align", "random", 8),  # 2 · (2 + 2)
        ("align", "best", 8),
        ("cross", None, 40),  # 2 · (4 + 4 · 4)
        ("cross", "random", 16),  # 2 · (4 + 4)
        ("cross", "best", 16),
    ],
)
def test_environment_steps_of_two_tasks(mode, handoff, expected):
    grown = Grown(Shape(2, 2, 2, joint_mode=mode, handoff=handoff), names="AB")
    assert grown.reward.scored == expected
    assert sum(len(n.scores_K) for tree in grown.trees for n in tree.nodes) == expected


@pytest.mark.parametrize("agents", [1, 2, 3, 4])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["align", "cross"])
@pytest.mark.parametrize("handoff", [None, "random", "best"])
def test_one_sample_and_one_score_call_a_turn(agents, turns, mode, handoff):
    generations = 2
    joint = generations if mode == "align" else generations**agents
    if handoff is None and joint ** (turns - 1) > 512:
        return  # cross with four agents and turns: 16³ leaves tell nothing that 8³ do not
    grown = Grown(Shape(agents, turns, generations, joint_mode=mode, handoff=handoff), names="AB")
    assert len(grown.sampler.calls) == turns  # each one generation call for each agent
    assert grown.reward.calls == turns
    assert len(grown.transition.calls) == turns - 1
    branch = 1 if handoff else joint
    for tree in grown.trees:
        # Level t has branch^(t−1) nodes, breadth first.
        expected = [t for t in range(1, turns + 1) for _ in range(branch ** (t - 1))]
        assert [node.turn for node in tree.nodes] == expected
        for node in tree.nodes:
            assert len(node.scores_K) == len(node.joint_actions_K) == joint
            assert [len(turn.completions_G) for turn in node.agents_N] == [generations] * agents


def test_joint_actions():
    align = Grown(Shape(3, 1, 2)).trees[0].nodes[0]
    assert align.joint_actions_K == ((0, 0, 0), (1, 1, 1))
    cross = Grown(Shape(2, 1, 3, joint_mode="cross")).trees[0].nodes[0]
    assert cross.joint_actions_K == tuple(itertools.product(range(3), repeat=2))


def test_chains_go_on_with_one_generation():
    # PPO: three samples at turn 1, each continued alone.
    grown = Grown(Shape(2, 3, 3, later_generations=1))
    assert [len(node.scores_K) for node in grown.trees[0].nodes] == [3, 1, 1, 1, 1, 1, 1]


# ---------------------------------------------------------------------------------- structure


def test_a_full_tree_stands_breadth_first_and_knows_its_parents():
    tree = Grown(Shape(1, 3, 2)).trees[0]
    assert places(tree) == [
        (1, -1, -1),
        (2, 0, 0), (2, 0, 1),
        (3, 1, 0), (3, 1, 1), (3, 2, 0), (3, 2, 1),
    ]  # fmt: skip
    assert tree.children(0) == {0: 1, 1: 2}
    assert tree.children(2) == {0: 5, 1: 6}
    # Each node's completions were sampled for its own path.
    paths = [parts(node.agents_N[0].completions_G[0].text)[1] for node in tree.nodes]
    assert paths == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_rewards_stand_at_the_joint_actions_that_they_belong_to():
    def value(name, path, gs):
        return sum(10.0**i * g for i, g in enumerate(gs)) + 1000 * len(path) + 10000 * (name == "B")

    for tree in Grown(Shape(2, 2, 2, joint_mode="cross"), value, names="AB").trees:
        for node in tree.nodes:
            base = 1000 * (node.turn - 1) + 10000 * (tree.task.task_id == "B")
            assert node.rewards_K == tuple(base + v for v in (0, 10, 1, 11))


def test_the_reward_processor_changes_training_rewards_alone():
    grown = Grown(Shape(1, 1, 2), lambda n, p, gs: 3.0 + gs[0], process=lambda r: 0.5 * r - 4)
    node = grown.trees[0].nodes[0]
    assert [score.value for score in node.scores_K] == [3.0, 4.0]
    assert node.rewards_K == (-2.5, -2.0)


def test_every_completion_has_a_key_of_its_own():
    sampler = FakeSampler()
    rollout = Rollout(sampler, FakeReward(lambda *_: 0.0), FakeTransition(), PROMPTS, seed=SEED)
    for step in (1, 2):
        rollout.grow(
            [task("A"), task("B")], Shape(2, 2, 2, joint_mode="cross"), SAMPLING, ("train", step)
        )
    # 2 steps · 2 tasks · (1 + 4) nodes · 2 agents · 2 generations
    assert len(sampler.keys) == len(set(sampler.keys)) == 2 * 2 * 5 * 2 * 2


# ------------------------------------------------------------------------------------ handoff


def test_best_hands_on_the_highest_reward_and_the_first_of_equals():
    rewards = {(): [1.0, 5.0, 5.0], (1,): [2.0, 2.0, 2.0], (1, 0): [0.0, 0.0, 1.0]}
    grown = Grown(
        Shape(2, 3, 3, joint_mode="align", handoff="best"), lambda n, path, gs: rewards[path][gs[0]]
    )
    assert places(grown.trees[0]) == [(1, -1, -1), (2, 0, 1), (3, 1, 0)]


def test_best_judges_what_the_reward_processor_makes_of_it():
    grown = Grown(
        Shape(1, 2, 2, joint_mode="align", handoff="best"),
        lambda n, p, gs: float(gs[0]),
        process=lambda r: -r,
    )
    assert places(grown.trees[0]) == [(1, -1, -1), (2, 0, 0)]


def test_random_draws_from_the_runs_keyed_numbers():
    names = string.ascii_uppercase
    grown = Grown(Shape(2, 2, 2, joint_mode="cross", handoff="random"), names=names)
    drawn = [uniforms((SEED, *KEY, name, (), "handoff"), 1)[0] for name in names]
    handed = [tree.nodes[1].parent_action for tree in grown.trees]
    assert handed == [math.floor(4 * number) for number in drawn]  # K = 4
    assert set(handed) == {0, 1, 2, 3}


def test_what_is_handed_on_is_what_the_agents_wrote():
    grown = Grown(
        Shape(2, 2, 2, joint_mode="cross", handoff="best"), lambda n, p, gs: float(gs == (1, 0))
    )
    (attempt,) = grown.transition.calls[0]
    assert attempt.completions_N == ("A||0|1", "A||1|0")
    assert (attempt.turn, attempt.task.task_id) == (1, "A")


# -------------------------------------------------------------------------- early termination


def test_a_branch_ends_where_the_mean_reward_exceeds_the_threshold():
    rewards = {
        (): [0.0, 1.0],  # mean 0.5: continued
        (0,): [1.0, 1.2],  # mean 1.1: ends
        (1,): [0.0, 2.0],  # mean 1.0: not above 1, continued
        (1, 0): [9.0, 9.0],
        (1, 1): [9.0, 9.0],
    }
    shape = Shape(2, 3, 2, early_termination_threshold=1.0)
    grown = Grown(shape, lambda n, path, gs: rewards[path][gs[0]])
    tree = grown.trees[0]
    assert places(tree) == [(1, -1, -1), (2, 0, 0), (2, 0, 1), (3, 2, 0), (3, 2, 1)]
    assert [node.terminated for node in tree.nodes] == [False, True, False, True, True]
    assert grown.reward.scored == 5 * 2


def test_each_task_ends_for_itself():
    shape = Shape(1, 2, 2, early_termination_threshold=0.0)
    grown = Grown(shape, lambda name, path, gs: float(name == "A"), names="AB")
    assert [len(tree.nodes) for tree in grown.trees] == [1, 3]


def test_the_threshold_is_compared_with_the_processed_reward():
    # Raw 3.9 − 4 = −0.1 > −0.2: ends, as the shipped thresholds expect.
    shape = Shape(1, 2, 2, early_termination_threshold=-0.2)
    assert len(Grown(shape, lambda *_: 3.9, process=lambda r: r - 4).trees[0].nodes) == 1
    assert len(Grown(shape, lambda *_: 3.7, process=lambda r: r - 4).trees[0].nodes) == 3


def test_nothing_is_asked_once_all_branches_have_ended():
    grown = Grown(Shape(2, 4, 2, early_termination_threshold=-1.0), names="AB")
    assert len(grown.sampler.calls) == grown.reward.calls == 1
    assert grown.transition.calls == []


# ------------------------------------------------------------------------------------ prompts


def test_each_agent_reads_its_own_past_alone():
    tree = Grown(Shape(2, 3, 2)).trees[0]
    prompt_N = PROMPTS.first(task(), 2)
    for agent in range(2):
        assert tree.nodes[0].agents_N[agent].prompt == (Message("user", prompt_N[agent]),)
        # Node 4 is reached by joint actions 0, then 1.
        assert places(tree)[4] == (3, 1, 1)
        assert tree.nodes[4].agents_N[agent].prompt == (
            Message("user", prompt_N[agent]),
            Message("assistant", f"A||{agent}|0"),
            Message("user", f"feedback on A||{agent}|0 at 1"),
            Message("assistant", f"A|0|{agent}|1"),
            Message("user", f"feedback on A|0|{agent}|1 at 2"),
        )


def test_history_last_shows_what_was_asked_for():
    tree = Grown(Shape(2, 3, 2), history=History("last", True, True)).trees[0]
    assert tree.nodes[4].agents_N[1].prompt == (
        Message("user", PROMPTS.first(task(), 2)[1]),
        Message("assistant", "A|0|1|1"),
        Message("user", "feedback on A|0|1|1 at 2"),
    )
    tree = Grown(Shape(2, 3, 2), history=History("last", False, False)).trees[0]
    assert tree.nodes[4].agents_N[1].prompt == (Message("user", "feedback on A|0|1|1 at 2"),)


def test_oldest_turns_leave_where_the_prompt_is_too_long():
    whole = Grown(Shape(1, 3, 2)).trees[0].nodes[4].agents_N[0]
    assert whole.turns_dropped == 0
    length = len(whole.prompt_ids) + SAMPLING.max_new_tokens
    cut = Grown(Shape(1, 3, 2), max_length=length - 1).trees[0].nodes[4].agents_N[0]
    assert cut.turns_dropped == 1
    assert cut.prompt == whole.prompt[2:]
    assert len(cut.prompt_ids) + SAMPLING.max_new_tokens < length
    with pytest.raises(PromptTooLongError, match=r"agent_model\.max_length"):
        Grown(Shape(1, 1, 2), max_length=20)


# ------------------------------------------------------------------------------ greedy (ReMax)


def test_greedy_returns_are_those_of_a_chain_from_each_state():
    def value(name, path, gs):
        return 1.0 + 10 * sum(path) + 100 * gs[0] if len(path) == 1 else 2.0 + gs[0]

    grown = Grown(Shape(2, 2, 2), value)
    trees = grown.rollout.grow([task("A"), task("B")], Shape(2, 2, 2), SAMPLING, KEY, 0.5)
    # Greedy is generation 0. Root: 2 + 0.5 · (1 + 10 · 0) = 2.5. Turn 2 has the child's own
    # state: after joint action 0: 1; after joint action 1: 1 + 10 = 11.
    assert [tree.greedy_SN for tree in trees] == [tuple((r, r) for r in (2.5, 1.0, 11.0))] * 2
    # Of each task 2 joint actions from the root and 1 from each child; the reward has scored them
    # beside the trees' 2 · 6.
    assert [tree.greedy_cost[0] for tree in trees] == [2 + 1 + 1] * 2
    assert sum(tree.scored for tree in trees) == grown.rollout.reward.scored - 6
    assert all(tree.greedy_cost[1] > 0 for tree in trees)
    # The trees themselves are as without: greedy text stands nowhere in them.
    assert trees[0].nodes == grown.trees[0].nodes
    assert all("greedy" not in c.text for n in trees[1].nodes for c in n.agents_N[0].completions_G)


def test_a_greedy_chain_ends_early_as_well():
    rollout = Grown(Shape(1, 2, 2)).rollout
    rollout.reward = FakeReward(lambda name, path, gs: 3.0 if gs == (0,) else -9.0)
    shape = Shape(1, 2, 2, early_termination_threshold=0.0)
    (tree,) = rollout.grow([task()], shape, SAMPLING, KEY, 0.5)
    # The root's mean is (3 − 9) / 2 < 0, so that it has two children; its greedy chain earns
    # 3 > 0 at once and ends.
    assert tree.greedy_SN == ((3.0,),) * 3
    assert tree.greedy_cost[0] == 3


# ----------------------------------------------------------------------------------- prefill


def test_texts_begin_with_the_prefill_and_tokens_after_it():
    """At every turn, it ends the prompt; what is learned from are the tokens that follow."""
    own = Prompts(CODE, {"prefill": "def {name}("})
    asked: list[tuple[str, ...]] = []

    class Reads(FakeReward):
        def score(self, actions):
            asked.extend(action.completions_N for action in actions)
            return [Score(0.0) for _ in actions]

    sampler = FakeSampler()
    rollout = Rollout(sampler, Reads(lambda *_: 0.0), FakeTransition(), own, seed=SEED)
    (tree,) = rollout.grow([task()], Shape(2, 2, 2, handoff="best"), SAMPLING, KEY)
    assert [node.turn for node in tree.nodes] == [1, 2]
    starts = ("def aux(", "def f(")
    for node in tree.nodes:
        for turn, start in zip(node.agents_N, starts, strict=True):
            assert turn.prompt[-1] == Message("assistant", start)
            assert bytes(turn.prompt_ids).decode().endswith("\n\n" + start)
            for completion in turn.completions_G:
                assert completion.text == start + bytes(completion.token_ids).decode()
    assert all(text.startswith(s) for N in asked for text, s in zip(N, starts, strict=True))
    first = tree.nodes[0].agents_N[1].completions_G[0].text
    assert Message("assistant", first) in tree.nodes[1].agents_N[1].prompt  # as a whole
