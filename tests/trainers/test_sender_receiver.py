"""A sender and a receiver in order: the exact gradient of the team's reward, by enumeration.

Policies are tables: the sender's over messages, the receiver's over actions for each message.
Every tree that can be sampled is credited by the project's own functions and weighted with its
probability; nothing is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.returns import agent_returns, joint_returns
from comlrl.types import AgentTurn, Completion, Node, Score, Task, Tree
from comlrl.update.losses import policy_gradient

# Rewards of (message, action): the sender must mean something, the receiver must heed it.
REWARD = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-1.0, 3.0]], dtype=torch.float64)
SENT, SIBLINGS = 2, 2  # messages of a tree, and answers to each


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    sender = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    receiver = torch.tensor(
        [[0.1, -0.4], [0.7, 0.2], [-0.5, 0.6]], dtype=torch.float64, requires_grad=True
    )
    return sender, receiver


def node(actions: Sequence[int], agent: int, parent: int, action: int, message: int) -> Node:
    turn = AgentTurn((), (message,), tuple(Completion("", (a,), True) for a in actions))
    joint = tuple((g,) for g in range(len(actions)))
    rewards = tuple(float(REWARD[message, a]) for a in actions) if agent else ()
    scores = tuple(map(Score, rewards))
    return Node(1, parent, action, (turn,), joint, scores, rewards, False, agent)


def trees(sender: torch.Tensor, receiver: torch.Tensor) -> Iterator[tuple[Tree, float]]:
    """Every tree with its probability."""
    message_probs, answered = sender.detach().softmax(-1), receiver.detach().softmax(-1)
    count = SENT * SIBLINGS
    for messages in itertools.product(range(3), repeat=SENT):
        for actions in itertools.product(range(2), repeat=count):
            groups = [actions[i : i + SIBLINGS] for i in range(0, count, SIBLINGS)]
            probability = float(message_probs[list(messages)].prod())
            below = []
            for g, (message, own) in enumerate(zip(messages, groups, strict=True)):
                probability *= float(answered[message, list(own)].prod())
                below.append(node(own, 1, 0, g, message))
            root = node(messages, 0, -1, -1, 0)
            yield Tree(Task("game", {}), (root, *below), "align", None), probability


def expected_loss(agent: int, kind: str, table: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The mean of L_i = −(1/|nodes|) Σ_nodes (1/G) Σ_g Â_g log π over all trees."""
    pair = (table, other) if agent == 0 else (other, table)
    total = torch.zeros((), dtype=torch.float64)
    for tree, probability in trees(*pair):
        returns = joint_returns(tree, 0.5)
        acting = [(n, r) for n, r in zip(tree.nodes, returns, strict=True) if agent in n.acting]
        for each, returns_K in acting:
            (own,) = agent_returns(each, returns_K)
            (turn,) = each.agents_N
            advantages = torch.tensor(sibling_advantages(own, kind), dtype=torch.float64)
            logits = table if agent == 0 else table[turn.prompt_ids[0]]
            chosen = [completion.token_ids[0] for completion in turn.completions_G]
            weight = advantages / len(own) / len(acting)
            total = total + probability * policy_gradient(logits.log_softmax(-1)[chosen], weight)
    return total


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize(("kind", "share"), [("raw", 1.0), ("rloo", 1.0), ("mean", 0.5)])
def test_the_expected_gradient_is_that_of_the_teams_reward(agent, kind, share):
    """The mean as a baseline holds an answer's own return: of G = 2 a half of the gradient is left,
    (G − 1) / G. Without a baseline, or with the others' mean, all of it."""
    sender, receiver = policies()
    table, other = (sender, receiver) if agent == 0 else (receiver, sender)
    (found,) = torch.autograd.grad(expected_loss(agent, kind, table, other), table)
    value = (sender.softmax(-1)[:, None] * receiver.softmax(-1) * REWARD).sum()
    (exact,) = torch.autograd.grad(value, table)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(-found, share * exact, rtol=0, atol=1e-9)
