"""What a reward is shown of a joint action's branch: its turn, and what was done before it."""

from __future__ import annotations

import pytest

from comlrl.rollout.grow import Rollout
from comlrl.types import JointAction, Shape
from tests.support.fakes import (
    PROMPTS,
    SAMPLING,
    SEED,
    FakeReward,
    FakeSampler,
    FakeTransition,
    task,
)


class Seen(FakeReward):
    """Keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(lambda name, path, gs: float(sum(path) + sum(gs)))
        self.actions: list[JointAction] = []

    def score(self, actions):
        self.actions += actions
        return super().score(actions)


def rollout(reward: Seen) -> Rollout:
    return Rollout(FakeSampler(), reward, FakeTransition(), PROMPTS, seed=SEED)


SHAPES = {
    "align": Shape(2, 3, 2),
    "cross": Shape(2, 2, 2, joint_mode="cross"),
    "handed on": Shape(2, 3, 3, handoff="best", handoff_width=2),
    "in order": Shape(3, 2, 2, turn_order="sequential"),
    "chains": Shape(2, 3, 2, later_generations=1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_reward_reads_the_turns_before(name):
    reward = Seen()
    trees = rollout(reward).grow([task("A"), task("B")], SHAPES[name], SAMPLING, ("train", 1))
    of_trees = [
        tree.joint_action(index, k)
        for turn in range(1, SHAPES[name].num_turns + 1)
        for tree in trees
        for index, node in enumerate(tree.nodes)
        if node.turn == turn
        for k in range(len(node.scores_K))
    ]
    assert reward.actions == of_trees  # the tree tells the same afterwards
    by_text = {(a.turn, a.completions_N): a for a in reward.actions}
    for action in reward.actions:
        assert [past.turn for past in action.history] == list(range(1, action.turn))
        for number, past in enumerate(action.history):
            assert past == by_text[past.turn, past.completions_N]
            assert past.history == action.history[:number]


def test_a_branch_has_its_own_past():
    reward = Seen()
    rollout(reward).grow([task("A")], Shape(2, 2, 2), SAMPLING, ("train", 1))
    assert [(a.completions_N, a.history) for a in reward.actions if a.turn == 2][:3] == [
        (("A|0|0|0", "A|0|1|0"), (reward.actions[0],)),
        (("A|0|0|1", "A|0|1|1"), (reward.actions[0],)),
        (("A|1|0|0", "A|1|1|0"), (reward.actions[1],)),
    ]


def test_greedy_rollouts_continue_the_branch_that_they_start_from():
    reward = Seen()
    shape = Shape(2, 2, 2, turn_order="sequential")
    rollout(reward).grow([task("A")], shape, SAMPLING, ("train", 1), 1.0)
    greedy = [a for a in reward.actions if a.completions_N[-1].endswith("greedy")]
    # From the second completion of the first agent: it stands in the past of the turn after.
    first = next(a for a in greedy if a.completions_N[0] == "A||0|1")
    assert (first.turn, first.history) == (1, ())
    assert any(a.turn == 2 and a.history == (first,) for a in greedy)
