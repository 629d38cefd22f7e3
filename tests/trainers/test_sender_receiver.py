"""A sender and a receiver in order: the exact gradient of the team's reward, by enumeration.

Policies are tables: the sender's over messages, the receiver's over actions for each message.
Every tree that can be sampled is credited by the project's own functions and weighted with its
probability; nothing is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.decisions import Decisions, View, decisions_of
from comlrl.credit.returns import joint_returns
from comlrl.models.critics import TeamCritic
from comlrl.types import AgentTurn, Completion, Node, Score, Shape, Task, Tree
from comlrl.update.losses import joint_dpo, policy_gradient
from comlrl.update.values import PooledReader, StepValues
from tests.support.agent_returns import agent_returns
from tests.support.trees import node

# Rewards of (message, action): the sender must mean something, the receiver must heed it.
REWARD = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-1.0, 3.0]], dtype=torch.float64)
SENT, SIBLINGS = 2, 2  # messages of a tree, and answers to each
ORDERED = Shape(2, 2, 1, turn_order="sequential")


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    sender = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    receiver = torch.tensor(
        [[0.1, -0.4], [0.7, 0.2], [-0.5, 0.6]], dtype=torch.float64, requires_grad=True
    )
    return sender, receiver


def acting(actions: Sequence[int], agent: int, parent: int, action: int, message: int) -> Node:
    turn = AgentTurn((), (message,), tuple(Completion("", (a,), True) for a in actions))
    rewards = [float(REWARD[message, a]) for a in actions] if agent else []
    return node([turn], rewards, parent=parent, action=action, first_agent=agent)


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
                below.append(acting(own, 1, 0, g, message))
            root = acting(messages, 0, -1, -1, 0)
            yield Tree(Task("game", {}), (root, *below), "align", None), probability


def expected_loss(agent: int, kind: str, table: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The mean of L_i = −(1/|nodes|) Σ_nodes (1/G) Σ_g Â_g log π over all trees."""
    pair = (table, other) if agent == 0 else (other, table)
    total = torch.zeros((), dtype=torch.float64)
    for tree, probability in trees(*pair):
        returns = joint_returns(tree, 0.5)
        own_nodes = [(n, r) for n, r in zip(tree.nodes, returns, strict=True) if agent in n.acting]
        for each, returns_K in own_nodes:
            (own,) = agent_returns(each, returns_K)
            (turn,) = each.agents_N
            advantages = torch.tensor(sibling_advantages(own, kind), dtype=torch.float64)
            logits = table if agent == 0 else table[turn.prompt_ids[0]]
            chosen = [completion.token_ids[0] for completion in turn.completions_G]
            weight = advantages / len(own) / len(own_nodes)
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


# ---------------------------------------------------------------- chains of two turns, with values

SENDER_PAY = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-1.0, 3.0]], dtype=torch.float64)
RECEIVER_PAY = torch.tensor([[0.0, 1.0], [2.0, -1.0], [3.0, 0.5]], dtype=torch.float64)
FEATURES, DISCOUNT = 6, 0.5


def tables() -> dict[tuple[int, int], torch.Tensor]:
    """Logits of each agent at each turn, by all that was written before."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(0, 1): (3,), (1, 1): (3, 2), (0, 2): (3, 2, 3), (1, 2): (3, 2, 3, 2)}
    return {
        place: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(True)
        for place, shape in shapes.items()
    }


def paid(turn: int, written: tuple[int, ...]) -> tuple[float, float]:
    """Each agent's reward of a turn; that of the second depends on the first."""
    message, action = written[-2:]
    factor = 1.0 if turn == 1 else 1.0 + written[0] - 2 * written[1]
    return tuple(factor * float(pay[message, action]) for pay in (SENDER_PAY, RECEIVER_PAY))


def chain(written: tuple[int, ...], own: bool) -> Tree:
    """Two turns in which each agent reads all that was written before it."""
    nodes = []
    for place, wrote in enumerate(written):
        turn, agent = place // 2 + 1, place % 2
        each = paid(turn, written[: place + 1]) if agent else (0.0, 0.0)
        scores = (Score(sum(each) / 2, by_agent=each),) if agent else ()
        read = AgentTurn((), (*written[:place], 9), (Completion("", (wrote,), True),))
        where = {"turn": turn, "parent": place - 1, "action": 0 if place else -1}
        paid_N = tuple(s.by_agent for s in scores) if own else ()
        nodes.append(node([read], scores, **where, first_agent=agent, own_rewards_KN=paid_N))
    return Tree(Task("game"), tuple(nodes), "align", None)


def seen(decisions: Decisions) -> torch.Tensor:
    """Features of what each agent reads, another vector for every prompt; (P, FEATURES)."""

    def features(ids: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(5**i * (t + 1) for i, t in enumerate(ids)))
        return torch.randn(FEATURES, generator=generator, dtype=torch.float64)

    return torch.stack([features(decisions[d].prompt_ids) for d in decisions.prompts])


def stirred_critic(heads: int = 1) -> TeamCritic:
    torch.manual_seed(1)
    critic = TeamCritic(FEATURES, hidden=8, heads=heads).double()
    torch.nn.init.normal_(critic.together[-1].weight)
    return critic


def views_of(decisions: Decisions, kind: str) -> list[list[View]]:
    """``all prompts``: the receiver's, which holds what the sender writes, for both values."""
    if kind == "all prompts":
        return [[View((at, at + 1), (at, at + 1))] for at in (0, 2)]
    return decisions.views(range(2), kind == "centralized")


def advantages(kind: str, own: bool, tree: Tree) -> list[float]:
    """Of each completion, in the order in which they were written."""
    decisions = decisions_of([tree])
    critic = stirred_critic(2 if own else 1)
    section = SimpleNamespace(discount=DISCOUNT, gae_lambda=1.0)
    reader = PooledReader(critic, decisions, seen(decisions), views_of(decisions, kind))
    values = StepValues(section, reader)
    found = values.credit(decisions.chains(range(2)), decisions.reward, None)
    return [float(found.of_completion[number]) for number in range(4)]


def expected_gradients(kind: str, own: bool) -> dict[tuple[int, int], torch.Tensor]:
    """Of −E[Σ Â log π], over all chains with their probabilities."""
    policy = tables()
    total = torch.zeros((), dtype=torch.float64)
    for written in itertools.product(range(3), range(2), range(3), range(2)):
        logprobs = [
            policy[place % 2, place // 2 + 1].log_softmax(-1)[written[: place + 1]]
            for place in range(4)
        ]
        probability = float(sum(logprobs).detach().exp())
        credit = torch.tensor(advantages(kind, own, chain(written, own)), dtype=torch.float64)
        total = total + probability * policy_gradient(torch.stack(logprobs), credit)
    grads = torch.autograd.grad(total, list(policy.values()))
    return dict(zip(policy, grads, strict=True))


def exact_gradients(own: bool) -> dict[tuple[int, int], torch.Tensor]:
    """Of the expected rewards from each turn on: the agent's own, or the team's mean."""
    policy, value = tables(), {(agent, turn): 0.0 for agent in range(2) for turn in (1, 2)}
    for written in itertools.product(range(3), range(2), range(3), range(2)):
        probability = sum(
            policy[place % 2, place // 2 + 1].log_softmax(-1)[written[: place + 1]]
            for place in range(4)
        ).exp()
        for agent, turn in value:
            rewards = [paid(t, written[: 2 * t]) for t in (1, 2)]
            each = [pair[agent] if own else sum(pair) / 2 for pair in rewards]
            future = each[0] + DISCOUNT * each[1] if turn == 1 else each[1]
            value[agent, turn] = value[agent, turn] + probability * future
    return {
        place: torch.autograd.grad(value[place], table, retain_graph=True)[0]
        for place, table in policy.items()
    }


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("independent", False),
        ("independent", True),
        ("centralized", False),
        ("centralized", True),
    ],
)
def test_values_of_chains_leave_the_expected_gradient_as_it_is(kind, own):
    """Whatever a critic says of what an agent has read, with λ = 1."""
    exact = exact_gradients(own)
    for place, found in expected_gradients(kind, own).items():
        assert exact[place].abs().max() > 0.01
        torch.testing.assert_close(-found, exact[place], rtol=0, atol=1e-6)


def test_a_value_that_reads_what_the_sender_writes_would_take_its_gradient_away():
    exact, found = exact_gradients(False), expected_gradients("all prompts", False)
    torch.testing.assert_close(-found[1, 1], exact[1, 1], rtol=0, atol=1e-6)
    assert (-found[0, 1] - exact[0, 1]).abs().max() > 0.01


# ------------------------------------------------------------------------- preferences (MADPO)


def test_each_agents_loss_on_a_pair_has_the_gradient_of_the_joint_one():
    """Over all pairs of joint actions that the reward orders: Δ_i is over what i wrote, given what
    it read, and the Δ sum to the joint log-ratio."""
    beta, (sender, receiver) = 0.3, policies()
    joint = list(itertools.product(range(3), range(2)))
    value = (sender.softmax(-1)[:, None] * receiver.softmax(-1)).detach()
    total = {"joint": 0.0, "sender": 0.0, "receiver": 0.0}
    for winner, loser in itertools.permutations(joint, 2):
        if REWARD[winner] <= REWARD[loser]:
            continue
        sent, answered = sender.log_softmax(-1), receiver.log_softmax(-1)
        delta = sent[winner[0]] - sent[loser[0]], answered[winner] - answered[loser]
        weight = value[winner] * value[loser]
        zero = torch.zeros((), dtype=torch.float64)
        losses = (sum(delta), zero), (delta[0], delta[1].detach()), (delta[1], delta[0].detach())
        for name, (own, others) in zip(total, losses, strict=True):
            total[name] = total[name] + weight * joint_dpo(own, others, beta, 0.0)
    exact = torch.autograd.grad(total["joint"], [sender, receiver], retain_graph=True)
    for name, table, wanted in zip(("sender", "receiver"), (sender, receiver), exact, strict=True):
        (found,) = torch.autograd.grad(total[name], table, retain_graph=True)
        assert wanted.abs().max() > 0.01
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
