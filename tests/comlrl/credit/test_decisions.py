"""Decisions of trees: each completion once, in the numbers of their joint actions where rollouts
are chains."""

from __future__ import annotations

from collections import Counter

import pytest

from comlrl.credit.decisions import decisions_of
from comlrl.credit.returns import completion_returns, joint_returns
from comlrl.types import Shape
from tests.support.grown import Grown
from tests.support.plain_chains import chains_of

CHAINS = {
    "one turn": Shape(2, 1, 3, later_generations=1),
    "three turns": Shape(3, 3, 2, later_generations=1),
    "early end": Shape(2, 3, 2, later_generations=1, early_termination_threshold=2.0),
    "in order": Shape(
        3, 2, 2, later_generations=1, turn_order="sequential", num_generations_sequential=1
    ),
}
TREES = CHAINS | {
    "align": Shape(2, 3, 2),
    "cross": Shape(3, 2, 2, joint_mode="cross"),
    "counterfactual": Shape(3, 1, 3, joint_mode="counterfactual"),
    "handed on": Shape(2, 3, 4, handoff="best", handoff_width=2),
    "in order, all": Shape(3, 2, 2, turn_order="sequential"),
}


def value(name: str, path: tuple[int, ...], gs: tuple[int, ...]) -> float:
    return len(path) + sum((i + 1) * g for i, g in enumerate(gs)) + (name == "B") * 0.5


def grown(shape: Shape):
    return Grown(shape, value, names="ABC").trees


@pytest.mark.parametrize("name", CHAINS)
def test_decision_c_n_plus_i_is_agent_is_part_of_joint_action_c(name):
    trees = grown(CHAINS[name])
    decisions, plain = decisions_of(trees), chains_of(trees)
    agents = range(trees[0].num_agents)
    assert len(decisions.numbered) == len(plain.reward_C) * len(agents)
    for number, decision in enumerate(decisions.numbered):
        action, agent = plain.origin(number)
        state = plain.state_C[action]
        turn = plain.turns_SN[state][agent]
        completion = turn.completions_G[plain.actions_S[state].index(action)]
        assert (decision.agent, decision.state) == (agent, state)
        assert (decision.turn, decision.prompt_ids) == (plain.turn_S[state], turn.prompt_ids)
        assert decision.completion == completion and decision.reward == plain.reward(number)
        before = decisions[decision.before].state if decision.before >= 0 else -1
        assert before == plain.parent_S[state]
    assert decisions.states_B == plain.states_B
    for agent in agents:
        assert sorted(decisions.chains([agent])) == sorted(plain.numbered([agent]))


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_read_was_asked_by_then(name):
    shape = CHAINS[name]
    decisions = decisions_of(grown(shape))
    for decision in decisions.numbered:
        last = shape.num_agents if shape.turn_order == "simultaneous" else decision.agent + 1
        read = [decisions[number] for number in decision.read]
        assert [d.agent for d in read] == list(range(last))
        assert {d.state for d in read} == {decision.state}
        assert read[decision.agent].prompt_ids == decision.prompt_ids
    for views in decisions.views(range(shape.num_agents), centralized=False):
        assert all(len(view.read) == 1 for view in views)


@pytest.mark.parametrize("name", TREES)
def test_each_completion_is_one_decision_with_its_siblings_returns(name):
    trees = grown(TREES[name])
    decisions = iter(decisions_of(trees, 0.5).numbered)
    for tree in trees:
        expected = {}
        for index, (node, returns_K) in enumerate(
            zip(tree.nodes, joint_returns(tree, 0.5), strict=True)
        ):
            for agent, turn in zip(node.acting, node.agents_N, strict=True):
                returns_G = tuple(completion_returns(node, agent, returns_K))
                for g, completion in enumerate(turn.completions_G):
                    expected[index, agent, g] = (completion.token_ids, returns_G)
        own = [next(decisions) for _ in expected]
        found = {(d.node, d.agent, d.place): (d.completion.token_ids, d.returns_G) for d in own}
        assert found == expected
    assert next(decisions, None) is None


@pytest.mark.parametrize("name", TREES)
def test_units_are_turns_and_count_their_nodes(name):
    shape, trees = TREES[name], grown(TREES[name])
    decisions = decisions_of(trees)
    nodes = Counter(agent for tree in trees for node in tree.nodes for agent in node.acting)
    assert sum(decisions.nodes_U, start=Counter()) == nodes
    assert sum(decisions.units_B) == len(decisions.nodes_U)
    if shape.turn_order == "simultaneous":
        assert len(decisions.nodes_U) == sum(len(tree.nodes) for tree in trees)
    for members in decisions.of_unit():
        places = {(decisions[n].turn, decisions[n].unit) for own in members.values() for n in own}
        assert len(places) == 1
