"""Tree → the return of each joint action → the return of each agent's completion.

    R_k(t) = r_k + γ · mean over the joint returns of the child that k led to (0 where it has none)

With ``handoff`` only one joint action has a child; γ · the child's mean return is then added to
every joint action of the node, so that it cancels in the sibling baseline and being picked is
neither reward nor punishment (a departure from MAGRPO's paper).
"""

from __future__ import annotations

from comlrl.types import Node, Tree


def joint_returns(tree: Tree, discount: float) -> list[list[float]]:
    """R_k for each node of the tree (its order) and each joint action, shape (nodes, K)."""
    returns: list[list[float]] = [list(node.rewards_K) for node in tree.nodes]
    for index in range(len(tree.nodes) - 1, 0, -1):  # children stand behind their parents
        node = tree.nodes[index]
        future = discount * mean(returns[index])
        receivers = (
            range(len(returns[node.parent])) if tree.handoff is not None else [node.parent_action]
        )
        for k in receivers:
            returns[node.parent][k] += future
    return returns


def agent_returns(node: Node, joint_returns_K: list[float]) -> list[list[float]]:
    """Each agent's return of each of its completions: the mean over the joint actions that
    contain it; shape (N, G)."""
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
