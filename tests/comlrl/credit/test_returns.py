"""Returns and credit on trees worked out by hand, and against the definition read literally."""

from __future__ import annotations

import itertools
import random

import pytest

from comlrl.credit.returns import agent_returns, joint_returns
from comlrl.types import AgentTurn, Completion, Message, Node, Score, Shape, Tree
from tests.comlrl.rollout.test_grow import Grown
from tests.fakes import task


def node(
    rewards: list[float],
    parent: int = -1,
    parent_action: int = -1,
    *,
    turn: int = 1,
    agents: int = 2,
    mode: str = "align",
    terminated: bool = False,
) -> Node:
    count = len(rewards) if mode == "align" else round(len(rewards) ** (1 / agents))
    joint = (
        tuple((g,) * agents for g in range(count))
        if mode == "align"
        else tuple(itertools.product(range(count), repeat=agents))
    )
    assert len(joint) == len(rewards)
    said = AgentTurn((Message("user", "p"),), (1,), (Completion("c", (1, 2), True),) * count)
    scores = tuple(Score(r) for r in rewards)
    return Node(
        turn, parent, parent_action, (said,) * agents, joint, scores, tuple(rewards), terminated
    )


def tree(*nodes: Node, mode: str = "align", handoff: str | None = None) -> Tree:
    return Tree(task(), nodes, mode, handoff)  # type: ignore[arg-type]


def close(values: list[list[float]]) -> list:
    return [pytest.approx(each) for each in values]


def test_one_turn_is_the_reward_itself():
    assert joint_returns(tree(node([1.0, 3.0])), 0.9) == [[1.0, 3.0]]


def test_align_two_turns():
    grown = tree(node([1.0, 3.0]), node([2.0, 4.0], 0, 0, turn=2), node([0.0, 2.0], 0, 1, turn=2))
    # Child of 0: mean (2 + 4) / 2 = 3; of 1: (0 + 2) / 2 = 1. γ = 0.5:
    # 1 + 0.5 · 3 = 2.5 and 3 + 0.5 · 1 = 3.5.
    returns = joint_returns(grown, 0.5)
    assert returns == [[2.5, 3.5], [2.0, 4.0], [0.0, 2.0]]
    # align: each completion stands in one joint action.
    assert agent_returns(grown.nodes[0], returns[0]) == [[2.5, 3.5], [2.5, 3.5]]


def test_cross_credits_the_mean_over_partners():
    root = node([1.0, 2.0, 3.0, 6.0], mode="cross")  # joint actions 00, 01, 10, 11
    # Agent 0: (1 + 2) / 2, (3 + 6) / 2. Agent 1: (1 + 3) / 2, (2 + 6) / 2.
    assert agent_returns(root, [1.0, 2.0, 3.0, 6.0]) == [[1.5, 4.5], [2.0, 4.0]]


def test_cross_two_turns():
    children = [([8.0] * 4, 0), ([0.0] * 4, 1), ([4.0] * 4, 2), ([16.0] * 4, 3)]
    grown = tree(
        node([1.0, 2.0, 3.0, 6.0], mode="cross"),
        *(node(r, 0, k, turn=2, mode="cross") for r, k in children),
        mode="cross",
    )
    # γ = 0.5: 1 + 4, 2 + 0, 3 + 2, 6 + 8.
    returns = joint_returns(grown, 0.5)
    assert returns[0] == [5.0, 2.0, 5.0, 14.0]
    # Agent 0: (5 + 2) / 2, (5 + 14) / 2. Agent 1: (5 + 5) / 2, (2 + 14) / 2.
    assert agent_returns(grown.nodes[0], returns[0]) == [[3.5, 9.5], [5.0, 8.0]]


def test_cross_of_three_agents():
    root = node([float(k) for k in range(8)], agents=3, mode="cross")  # 000, 001, …, 111
    # Agent 0 (slowest): 0‥3 and 4‥7; agent 1: {0, 1, 4, 5} and {2, 3, 6, 7}; agent 2: even, odd.
    assert agent_returns(root, list(root.rewards_K)) == [[1.5, 5.5], [2.5, 4.5], [3.0, 4.0]]


def test_cross_of_four_agents():
    rewards = [0.0] * 16
    rewards[0b1010] = 8.0  # agents 0 and 2 say their second, agents 1 and 3 their first
    root = node(rewards, agents=4, mode="cross")
    # Each completion stands in 8 joint actions; 8 / 8 = 1 where it is the right one.
    right, wrong = [0.0, 1.0], [1.0, 0.0]
    assert agent_returns(root, rewards) == [right, wrong, right, wrong]


def test_handoff_gives_the_future_to_every_joint_action():
    grown = tree(node([1.0, 3.0]), node([2.0, 6.0], 0, 1, turn=2), handoff="random")
    # The child's mean is 4; γ = 0.5: 1 + 2 and 3 + 2, so that the difference stays 2.
    assert joint_returns(grown, 0.5)[0] == [3.0, 5.0]


def test_four_turns_with_handoff():
    grown = tree(
        node([0.0, 2.0]),
        node([1.0, 1.0], 0, 1, turn=2),
        node([4.0, 0.0], 1, 0, turn=3),
        node([8.0, 8.0], 2, 1, turn=4),
        handoff="best",
    )
    # γ = 0.5. Turn 4: mean 8. Turn 3: 4 + 4, 0 + 4; mean 6. Turn 2: 1 + 3; mean 4.
    # Turn 1: 0 + 2, 2 + 2.
    expected = [[2.0, 4.0], [4.0, 4.0], [8.0, 4.0], [8.0, 8.0]]
    assert joint_returns(grown, 0.5) == expected


def test_three_turns_with_an_early_end():
    grown = tree(
        node([0.0, 1.0]),
        node([1.0, 3.0], 0, 0, turn=2, terminated=True),
        node([0.0, 2.0], 0, 1, turn=2),
        node([10.0, 30.0], 2, 0, turn=3),
        node([0.0, 10.0], 2, 1, turn=3),
    )
    # γ = 0.1. Behind node 2: 0 + 0.1 · 20 = 2 and 2 + 0.1 · 5 = 2.5, mean 2.25. Node 1 ended with
    # mean 2. Root: 0 + 0.1 · 2 = 0.2 and 1 + 0.1 · 2.25 = 1.225.
    returns = joint_returns(grown, 0.1)
    assert returns == close([[0.2, 1.225], [1.0, 3.0], [2.0, 2.5], [10.0, 30.0], [0.0, 10.0]])


def test_one_agent_is_credited_with_its_own_returns():
    root = node([1.0, 5.0, 3.0], agents=1)
    assert agent_returns(root, [1.0, 5.0, 3.0]) == [[1.0, 5.0, 3.0]]


def test_the_tree_stays_as_it_is():
    grown = tree(node([1.0, 3.0]), node([2.0, 4.0], 0, 0, turn=2))
    joint_returns(grown, 0.5)
    assert grown.nodes[0].rewards_K == (1.0, 3.0)


def _literally(grown: Tree, index: int, discount: float) -> list[float]:
    """R_k = r_k + γ · mean over the child's joint returns, by recursion from the root."""
    here = grown.nodes[index]
    futures = {
        k: sum(values) / len(values)
        for k, child in grown.children(index).items()
        for values in [_literally(grown, child, discount)]
    }
    if grown.handoff is not None and futures:
        futures = dict.fromkeys(range(len(here.rewards_K)), next(iter(futures.values())))
    return [r + discount * futures.get(k, 0.0) for k, r in enumerate(here.rewards_K)]


@pytest.mark.parametrize("mode", ["align", "cross"])
@pytest.mark.parametrize("handoff", [None, "random", "best"])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
@pytest.mark.parametrize("agents", [1, 2, 3, 4])
def test_grown_trees_agree_with_the_definition(mode, handoff, turns, agents):
    if handoff is None and mode == "cross" and agents * turns > 9:
        return  # thousands of nodes tell nothing more
    draw = random.Random(repr((mode, handoff, turns, agents)))
    rewards: dict = {}

    def value(*where):
        return rewards.setdefault(where, draw.uniform(-4, 4))

    shape = Shape(agents, turns, 2, mode, handoff, early_termination_threshold=1.5)
    for grown in Grown(shape, value, names="AB").trees:
        fast = joint_returns(grown, 0.9)
        for index, here in enumerate(grown.nodes):
            assert fast[index] == pytest.approx(_literally(grown, index, 0.9))
            for agent, credited in enumerate(agent_returns(here, fast[index])):
                for g, value_g in enumerate(credited):
                    own = [
                        r
                        for action, r in zip(here.joint_actions_K, fast[index], strict=True)
                        if action[agent] == g
                    ]
                    assert value_g == pytest.approx(sum(own) / len(own))
