"""``joint_mode: counterfactual``: what is scored and credited, and its expected gradient by
enumeration of everything that three agents with tables can sample."""

from __future__ import annotations

import itertools

import pytest
import torch

from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.returns import counterfactuals
from comlrl.types import AgentTurn, Completion, Node, Shape
from comlrl.update.losses import policy_gradient
from tests.support import trees
from tests.support.agent_returns import agent_returns
from tests.support.grown import Grown

# Of three agents with two answers each: the first two have to agree, and the third matters then.
REWARD = torch.tensor([[[1.0, 4.0], [-2.0, 0.5]], [[0.0, 3.0], [2.0, -1.0]]], dtype=torch.float64)


def joint(agents: int, generations: int) -> tuple[tuple[int, ...], ...]:
    """The joint actions that a rollout scores."""
    grown = Grown(Shape(agents, 1, generations, joint_mode="counterfactual"))
    return grown.trees[0].nodes[0].joint_actions_K


def node(rewards: list[float], actions, answers_NG=((0, 1),) * 3) -> Node:
    turns = [
        AgentTurn((), (), tuple(Completion("", (a,), True) for a in own)) for own in answers_NG
    ]
    return trees.node(turns, rewards, actions)


@pytest.mark.parametrize(
    ("agents", "generations"), [(1, 3), (2, 3), (3, 2), (3, 4), (5, 3), (4, 1)]
)
def test_joint_actions_are_the_aligned_ones_and_their_single_replacements(agents, generations):
    found = joint(agents, generations)
    expected = [
        action
        for action in itertools.product(range(generations), repeat=agents)
        if any(sum(g != h for g in action) <= 1 for h in range(generations))
    ]
    assert list(found) == expected
    count = Shape(agents, 1, generations, joint_mode="counterfactual").joint_actions(
        agents, generations
    )
    assert count == len(expected)


def test_returns_compare_completions_with_the_same_partners():
    """Of agent 0: joint actions 0|00, 1|00, 0|11 and 1|11. It is not credited with 001, 010, 101
    and 110, whose partners it is in half of, and its siblings are not."""
    actions = tuple(itertools.product(range(2), repeat=3))  # with G = 2 all eight
    rewards = [1.0, 100.0, 200.0, 3.0, 5.0, 400.0, 300.0, 9.0]  # 000, 001, …, 111
    # all of them are compared: 01 and 10 are groups with both completions, too
    assert counterfactuals(node(rewards, actions), 0) == [[0, 4], [1, 5], [2, 6], [3, 7]]

    actions = joint(3, 3)
    rewards = [float(10 * a + b + c) if b == c else 1000.0 for a, b, c in actions]
    three = node(rewards, actions, ((0, 1, 2),) * 3)
    assert len(counterfactuals(three, 0)) == 3
    # a with partners 00, 11, 22: 10 a + mean(0, 2, 4)
    assert agent_returns(three, rewards)[0] == [2.0, 12.0, 22.0]


def test_joint_actions_with_the_same_partners_share_a_completions_return():
    """cross: the mean of R_k less the mean of its counterfactuals is the advantage as it was."""
    actions = tuple(itertools.product(range(3), repeat=3))
    rewards = [float((7 * k) % 11) for k in range(27)]
    crossed = node(rewards, actions, ((0, 1, 2),) * 3)
    for agent, returns_G in enumerate(agent_returns(crossed, rewards)):
        of_completion: dict[int, list[float]] = {}
        for group in counterfactuals(crossed, agent):
            mean = sum(rewards[k] for k in group) / len(group)
            for k in group:
                of_completion.setdefault(actions[k][agent], []).append(rewards[k] - mean)
        own = [sum(of_completion[g]) / len(of_completion[g]) for g in range(3)]
        assert sibling_advantages(returns_G, "mean") == pytest.approx(own)


def test_without_counterfactuals_all_joint_actions_count():
    aligned = node([1.0, 3.0], ((0, 0, 0), (1, 1, 1)))
    assert counterfactuals(aligned, 1) == []
    assert agent_returns(aligned, [1.0, 3.0]) == [[1.0, 3.0]] * 3


@pytest.mark.parametrize(("kind", "share"), [("rloo", 1.0), ("mean", 0.5), ("raw", 1.0)])
@pytest.mark.parametrize("agent", range(3))
def test_the_expected_gradient_is_that_of_the_teams_reward(agent, kind, share):
    tables = torch.tensor(
        [[0.3, -0.2], [0.1, 0.7], [-0.4, 0.5]], dtype=torch.float64, requires_grad=True
    )
    chances, actions = tables.detach().softmax(-1), joint(3, 2)
    loss = torch.zeros((), dtype=torch.float64)
    for drawn in itertools.product(range(2), repeat=6):
        answers = (drawn[:2], drawn[2:4], drawn[4:])
        probability = float(
            torch.stack([chances[i, list(own)].prod() for i, own in enumerate(answers)]).prod()
        )
        rewards = [
            float(REWARD[tuple(answers[i][g] for i, g in enumerate(action))]) for action in actions
        ]
        returns = agent_returns(node(rewards, actions, answers), rewards)[agent]
        weight = torch.tensor(sibling_advantages(returns, kind), dtype=torch.float64) / 2
        logprob = tables[agent].log_softmax(-1)[list(answers[agent])]
        loss = loss + probability * policy_gradient(logprob, weight)
    (found,) = torch.autograd.grad(loss, tables)
    value = torch.einsum("a,b,c,abc->", *tables.softmax(-1), REWARD)
    (exact,) = torch.autograd.grad(value, tables)
    assert exact[agent].abs().max() > 0.05
    torch.testing.assert_close(-found[agent], share * exact[agent], rtol=0, atol=1e-9)
