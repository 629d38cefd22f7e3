"""Tree → the return of each joint action → the return of each agent's completion.

    R_k(t) = r_k + γ · mean over the joint returns of the child that k led to (0 where it has none)

In a sequential turn r_k is 0 until the last agent has acted, and γ counts between turns alone: an
agent's return is the mean of what follows it within the turn.

With ``handoff`` m of a turn's joint actions have children (m is ``handoff_width``). They are
credited with their own futures, the others with the mean of those, so that being picked is
neither reward nor punishment. With m = 1 all are credited with one future, which cancels in the
sibling baseline: γ then has no effect, and a turn learns from its own reward alone. With m = K it
is the full tree. (A departure from MAGRPO's paper.)
"""

from __future__ import annotations

from collections import defaultdict

from comlrl.types import Node, Tree


def joint_returns(tree: Tree, discount: float) -> list[list[float]]:
    """R_k for each node of the tree (its order) and each joint action, shape (nodes, K)."""
    returns = [list(node.rewards_K) or [0.0] * len(node.joint_actions_K) for node in tree.nodes]
    starts = tree.turn_starts()
    future: dict[tuple[int, int], float] = {}  # of a node's joint action
    handed_on: defaultdict[int, list[float]] = defaultdict(list)  # futures behind a whole turn
    for index in range(len(tree.nodes) - 1, -1, -1):  # children stand behind their parents
        node, others = tree.nodes[index], 0.0
        if tree.handoff is not None and node.scores_K and not node.terminated:
            others = mean(handed_on[starts[index]] or [0.0])
        for k in range(len(returns[index])):
            returns[index][k] += future.get((index, k), others)
        value = mean(returns[index])
        if node.first_agent == 0:  # a turn lies between it and its parent
            value *= discount
            if node.parent >= 0:
                handed_on[starts[node.parent]].append(value)
        future[node.parent, node.parent_action] = value
    return returns


def agent_returns(node: Node, joint_returns_K: list[float]) -> list[list[float]]:
    """The return of each completion of each agent that acts here: the mean over the joint actions
    that contain it; shape (N, G)."""
    returns_NG = []
    for agent, turn in enumerate(node.agents_N):
        total, count = [0.0] * len(turn.completions_G), [0] * len(turn.completions_G)
        for action, value in zip(node.joint_actions_K, joint_returns_K, strict=True):
            total[action[agent]] += value
            count[action[agent]] += 1
        returns_NG.append([t / c for t, c in zip(total, count, strict=True)])
    return returns_NG


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
