"""Returns and credit on trees worked out by hand, and against the definition read literally."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.returns import completion_returns, joint_returns
from comlrl.types import AgentTurn, Completion, Message, Node, Score, Shape, Tree
from tests.support.agent_returns import agent_returns
from tests.support.fakes import task
from tests.support.grown import Grown


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
    agent_turn = AgentTurn((Message("user", "p"),), (1,), (Completion("c", (1, 2), True),) * count)
    scores = tuple(Score(r) for r in rewards)
    return Node(
        turn=turn,
        parent=parent,
        parent_action=parent_action,
        agents_N=(agent_turn,) * agents,
        joint_actions_K=joint,
        scores_K=scores,
        rewards_K=tuple(rewards),
        terminated=terminated,
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


def test_optimistic_credit_is_the_best_of_all_siblings_with_the_same_tokens():
    rewards = [11.0, -30.0, 0.0, -30.0, 7.0, 6.0, 0.0, 0.0, 5.0]  # the climbing game, cross
    three = node(rewards, mode="cross")
    apart = tuple(Completion(name, (ord(name),), True) for name in "abc")
    twice = (apart[0], apart[1], apart[0])
    turns = [replace(three.agents_N[0], completions_G=each) for each in (apart, twice)]
    climbing = replace(three, agents_N=tuple(turns))
    assert completion_returns(climbing, 0, rewards) == [
        pytest.approx(v) for v in (-19 / 3, -17 / 3, 5 / 3)
    ]
    assert completion_returns(climbing, 0, rewards, leniency=1.0) == [11.0, 7.0, 5.0]
    assert completion_returns(climbing, 1, rewards, leniency=1.0) == [11.0, 7.0, 11.0]
    halfway = completion_returns(climbing, 0, rewards, leniency=0.5)
    assert halfway == [pytest.approx(v) for v in (7 / 3, 2 / 3, 10 / 3)]
    aligned = replace(node([1.0, 2.0, 5.0]), agents_N=tuple(turns))
    assert completion_returns(aligned, 0, [1.0, 2.0, 5.0], leniency=1.0) == [1.0, 2.0, 5.0]
    assert completion_returns(aligned, 1, [1.0, 2.0, 5.0], leniency=1.0) == [5.0, 2.0, 5.0]


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


@pytest.mark.parametrize("handoff", ["random", "best"])
def test_those_handed_on_are_credited_with_their_own_future(handoff):
    grown = tree(
        node([1.0, 2.0, 3.0, 6.0]),
        node([2.0, 6.0], 0, 1, turn=2),  # mean 4
        node([8.0, 12.0], 0, 3, turn=2),  # mean 10
        handoff=handoff,
    )
    # γ = 0.5: futures 2 and 5, their mean 3.5 for those that were not handed on. What was
    # handed on is credited with (4 − 1) / (2 − 1) = 3 times the distance: 3.5 − 4.5, 3.5 + 4.5.
    returns = joint_returns(grown, 0.5)[0]
    assert returns == [1 + 3.5, 2 - 1, 3 + 3.5, 6 + 8]
    # The baseline is the mean of r, 3, plus the mean future of those handed on.
    assert sum(returns) / 4 == 3 + 3.5


def test_with_one_handed_on_the_discount_cancels_and_with_two_it_does_not():
    one = tree(node([1.0, 3.0]), node([2.0, 6.0], 0, 1, turn=2), handoff="best")
    two = tree(*one.nodes, node([0.0, 2.0], 0, 0, turn=2), handoff="best")
    for grown, gaps in ((one, [2.0, 2.0, 2.0]), (two, [2.0, 3.5, 5.0])):
        # 3 − 1 = 2 by itself; with two, 4 and 1 follow: 2 + γ · (4 − 1).
        returns = [joint_returns(grown, discount)[0] for discount in (0.0, 0.5, 1.0)]
        assert [r[1] - r[0] for r in returns] == gaps


def test_three_turns_of_a_wider_handoff():
    grown = tree(
        node([0.0, 2.0, 4.0]),
        node([1.0, 1.0, 4.0], 0, 0, turn=2),
        node([0.0, 3.0, 0.0], 0, 2, turn=2),
        node([2.0, 2.0], 1, 0, turn=3),
        node([6.0, 8.0], 1, 1, turn=3),
        node([0.0, 0.0], 2, 1, turn=3),
        node([4.0, 0.0], 2, 2, turn=3),
        handoff="random",
    )
    # γ = 0.5 and a factor of (3 − 1) / (2 − 1) = 2. After node 1: futures 1 and 3.5, mean 2.25,
    # credited −0.25, 4.75 and 2.25. After node 2: 0 and 1, mean 0.5, credited 0.5, −0.5 and 1.5.
    # Root: futures 0.5 · 12.75 / 3 = 2.125 and 0.5 · 4.5 / 3 = 0.75, mean 1.4375 ± 2 · 0.6875.
    assert joint_returns(grown, 0.5)[:3] == close(
        [[2.8125, 3.4375, 4.0625], [0.75, 5.75, 6.25], [0.5, 2.5, 1.5]]
    )


def averaged(grow: Callable[[Sequence[int]], Tree], actions: int, width: int, advantage: str):
    """Each agent's advantages at the nodes of turn 1, averaged over the choices of ``width`` of
    the turn's joint actions."""
    chosen = list(itertools.combinations(range(actions), width))
    found = []
    for own in chosen:
        grown = grow(own)
        returns = joint_returns(grown, 1.0)
        found.append(
            [
                a
                for here, returns_K in zip(grown.nodes, returns, strict=True)
                if here.turn == 1
                for returns_G in agent_returns(here, returns_K)
                for a in sibling_advantages(returns_G, advantage)
            ]
        )
    return [sum(values) / len(chosen) for values in zip(*found, strict=True)]


VALUES = [0.3, -2.0, 1.7, 4.0, 0.9, -1.1, 2.2, 3.6, -0.4]


@pytest.mark.parametrize("advantage", ["mean", "rloo"])
@pytest.mark.parametrize(
    ("mode", "count", "width"),
    [
        (mode, count, width)
        for mode, count in (("align", 4), ("align", 5), ("cross", 9))
        for width in range(2, count + 1)
    ],
)
def test_the_future_counts_as_much_as_the_reward(mode, count, width, advantage):
    """By enumeration: the same values as rewards of turn 1, and as what turn 2 comes to."""
    values = VALUES[:count]

    def following(chosen: Sequence[int]) -> Tree:
        ends = [node([values[k]] * count, 0, k, turn=2, mode=mode) for k in chosen]
        return tree(node([0.0] * count, mode=mode), *ends, mode=mode, handoff="random")

    at_once = averaged(lambda _: tree(node(values, mode=mode), mode=mode), count, width, advantage)
    assert averaged(following, count, width, advantage) == pytest.approx(at_once, abs=1e-9)


# ---------------------------------------------------------------------------- agents in order


def act(
    agent: int, rewards: list[float] | int, parent: int = -1, action: int = -1, *, turn: int = 1,
    terminated: bool = False,
) -> Node:  # fmt: skip
    """A node at which one agent acts; a number of completions where others are still to act."""
    values = () if isinstance(rewards, int) else tuple(rewards)
    count = rewards if isinstance(rewards, int) else len(rewards)
    agent_turn = AgentTurn((Message("user", "p"),), (1,), (Completion("c", (1, 2), True),) * count)
    scores = tuple(Score(r) for r in values)
    joint = tuple((g,) for g in range(count))
    return Node(
        turn=turn,
        parent=parent,
        parent_action=action,
        agents_N=(agent_turn,),
        joint_actions_K=joint,
        scores_K=scores,
        rewards_K=values,
        terminated=terminated,
        first_agent=agent,
    )


def advantages(grown: Tree, discount: float = 0.5) -> list[list[float]]:
    returns = joint_returns(grown, discount)
    own = [agent_returns(n, r)[0] for n, r in zip(grown.nodes, returns, strict=True)]
    return [sibling_advantages(each, "mean") for each in own]


def test_two_agents_in_order():
    grown = tree(act(0, 2), act(1, [1.0, 3.0], 0, 0), act(1, [0.0, 8.0], 0, 1))
    # An earlier agent's returns are the means below it, (1 + 3) / 2 and (0 + 8) / 2: no discount.
    assert joint_returns(grown, 0.5) == [[2.0, 4.0], [1.0, 3.0], [0.0, 8.0]]
    # Siblings share agent and prompt: the receiver's are those below one completion.
    assert advantages(grown) == [[-1.0, 1.0], [-1.0, 1.0], [-4.0, 4.0]]


def test_three_agents_in_order():
    grown = tree(
        act(0, 2),
        act(1, 2, 0, 0), act(1, 2, 0, 1),
        act(2, [1.0, 3.0], 1, 0), act(2, [5.0, 7.0], 1, 1),
        act(2, [0.0, 0.0], 2, 0), act(2, [2.0, 2.0], 2, 1),
    )  # fmt: skip
    # Below the second agent's: 2 and 6, 0 and 2. Below the first's: 4 and 1.
    assert joint_returns(grown, 0.9)[:3] == [[4.0, 1.0], [2.0, 6.0], [0.0, 2.0]]
    assert advantages(grown)[:3] == [[1.5, -1.5], [-2.0, 2.0], [-1.0, 1.0]]


TWO_TURNS = (
    act(0, 2),
    act(1, [1.0, 3.0], 0, 0), act(1, [9.0, 9.0], 0, 1, terminated=True),
    act(0, 2, 1, 0, turn=2), act(0, 2, 1, 1, turn=2),
    act(1, [2.0, 4.0], 3, 0, turn=2), act(1, [6.0, 8.0], 3, 1, turn=2),
    act(1, [0.0, 0.0], 4, 0, turn=2), act(1, [4.0, 0.0], 4, 1, turn=2),
)  # fmt: skip


def test_two_turns_in_order_one_branch_of_which_ends():
    # γ = 0.5, between the turns alone. Turn 2: 3 and 7, mean 5; 0 and 2, mean 1. Turn 1: main's
    # 1 + 2.5 and 3 + 0.5, mean 3.5; what ended has 9 and no future. aux: 3.5 and 9.
    grown = tree(*TWO_TURNS)
    assert joint_returns(grown, 0.5)[:5] == [
        [3.5, 9.0], [3.5, 3.5], [9.0, 9.0], [3.0, 7.0], [0.0, 2.0],
    ]  # fmt: skip
    assert advantages(grown)[:4] == [[-2.75, 2.75], [0.0, 0.0], [0.0, 0.0], [-2.0, 2.0]]


def test_a_turn_in_order_hands_on_as_one():
    begun = [act(0, 2), act(1, [1.0, 3.0], 0, 0), act(1, [0.0, 8.0], 0, 1)]
    turn_2 = [act(0, 2, 2, 0, turn=2), act(1, [2.0, 2.0], 3, 0, turn=2),
              act(1, [6.0, 6.0], 3, 1, turn=2)]  # fmt: skip
    grown = tree(*begun, *turn_2, handoff="random")
    # γ = 0.5, mean 4: all four joint actions of the turn get 2, and nobody's advantage changes.
    assert joint_returns(grown, 0.5)[:3] == [[4.0, 6.0], [3.0, 5.0], [2.0, 10.0]]
    assert advantages(grown)[:3] == advantages(tree(*begun))
    # Two handed on, one below each of aux's completions: 2 and 0.5 · 8 = 4, the others' 3. Of the
    # turn's four joint actions, hence 3 ± (4 − 1) / (2 − 1) · 1.
    more = [act(0, 2, 1, 1, turn=2), act(1, [8.0, 8.0], 6, 0, turn=2),
            act(1, [8.0, 8.0], 6, 1, turn=2)]  # fmt: skip
    grown = tree(*begun, *turn_2, *more, handoff="random")
    assert joint_returns(grown, 0.5)[:3] == [[6.5, 5.5], [4.0, 9.0], [0.0, 11.0]]


@pytest.mark.parametrize("advantage", ["mean", "rloo"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_in_order_too_the_future_counts_as_much_as_the_reward(width, advantage):
    values, places = VALUES[:4], [(1, 0), (1, 1), (2, 0), (2, 1)]

    def begun(rewards: Sequence[float]) -> list[Node]:
        return [act(0, 2), act(1, [*rewards[:2]], 0, 0), act(1, [*rewards[2:]], 0, 1)]

    def following(chosen: Sequence[int]) -> Tree:
        nodes = begun([0.0] * 4)
        for k in chosen:
            nodes.append(act(0, 2, *places[k], turn=2))
            parent = len(nodes) - 1
            nodes += [act(1, [values[k]] * 2, parent, g, turn=2) for g in range(2)]
        return tree(*nodes, handoff="random")

    at_once = averaged(lambda _: tree(*begun(values)), 4, width, advantage)
    assert averaged(following, 4, width, advantage) == pytest.approx(at_once, abs=1e-9)


def test_a_branch_that_ended_is_no_choice_of_the_handoff():
    grown = tree(
        act(0, 2), act(1, [1.0, 3.0, 2.0], 0, 0), act(1, [9.0, 9.0, 9.0], 0, 1, terminated=True),
        act(0, 2, 1, 0, turn=2), act(0, 2, 1, 2, turn=2),
        act(1, [2.0, 2.0], 3, 0, turn=2), act(1, [2.0, 2.0], 3, 1, turn=2),
        act(1, [6.0, 6.0], 4, 0, turn=2), act(1, [6.0, 6.0], 4, 1, turn=2),
        handoff="random",
    )  # fmt: skip
    # γ = 1: 2 and 6 of three that might be continued: 4 ± (3 − 1) / (2 − 1) · 2.
    assert joint_returns(grown, 1.0)[1:3] == [[1.0 + 0, 3.0 + 4, 2.0 + 8], [9.0, 9.0, 9.0]]


def test_three_turns_with_an_early_end():
    grown = tree(
        node([0.0, 1.0]),
        node([1.0, 3.0], 0, 0, turn=2, terminated=True),
        node([0.0, 2.0], 0, 1, turn=2),
        node([10.0, 30.0], 2, 0, turn=3),
        node([0.0, 10.0], 2, 1, turn=3),
    )
    # γ = 0.1. After node 2: 0 + 0.1 · 20 = 2 and 2 + 0.1 · 5 = 2.5, mean 2.25. Node 1 ended with
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
    """R_k by recursion from the root: r_k + γ · the mean of what follows k. Where m of a turn's K
    joint actions were handed on, the others are given the mean of those futures, and these
    (K − 1) / (m − 1) times their distance from it."""
    here, own = grown.nodes[index], list(grown.nodes[index].rewards_K)
    below = {k: _literally(grown, c, discount) for k, c in grown.children(index).items()}
    follows = {k: sum(values) / len(values) for k, values in below.items()}
    if not own:
        return [follows[k] for k in range(len(here.joint_actions_K))]
    future = 0.0
    if grown.handoff is not None and not here.terminated:
        starts = grown.turn_starts()
        begun = [
            i
            for i, n in enumerate(grown.nodes)
            if n.turn == here.turn + 1 and i == starts[i] and starts[n.parent] == starts[index]
        ]
        means = [sum(v) / len(v) for v in (_literally(grown, i, discount) for i in begun)]
        future = sum(means) / len(means) if means else 0.0
        turn = [
            n
            for i, n in enumerate(grown.nodes)
            if starts[i] == starts[index] and n.rewards_K and not n.terminated
        ]
        if len(means) > 1:
            factor = (sum(len(n.rewards_K) for n in turn) - 1) / (len(means) - 1)
            follows = {k: future + factor * (own - future) for k, own in follows.items()}
    return [r + discount * follows.get(k, future) for k, r in enumerate(own)]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
@pytest.mark.parametrize("handoff", [None, "random", "best"])
def test_grown_trees_of_every_order_and_width_agree_with_the_definition(
    handoff, order, agents, width
):
    draw, rewards = random.Random(repr((handoff, order, agents, width))), {}

    def value(*where):
        return rewards.setdefault(where, draw.uniform(-4, 4))

    shape = Shape(
        agents,
        2 if handoff is None else 3,
        3 if order == "simultaneous" else 2,
        joint_mode="align",
        handoff=handoff,
        early_termination_threshold=1.0,
        handoff_width=width,
        turn_order=order,
    )
    trees = Grown(shape, value, names="ABCDEF").trees
    assert (
        len({n.terminated for t in trees for n in t.nodes}) == 2
    )  # some end early, some are continued
    for grown in trees:
        fast = joint_returns(grown, 0.9)
        for index in range(len(grown.nodes)):
            assert fast[index] == pytest.approx(_literally(grown, index, 0.9))


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

    shape = Shape(
        agents, turns, 2, joint_mode=mode, handoff=handoff, early_termination_threshold=1.5
    )
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
