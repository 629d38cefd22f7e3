"""The returns of all agents that act at a node."""

from __future__ import annotations

from comlrl.credit.returns import completion_returns
from comlrl.types import Node


def agent_returns(node: Node, joint_returns_K: list[float]) -> list[list[float]]:
    """The return of each completion of each of them, shape (N, G)."""
    return [completion_returns(node, agent, joint_returns_K) for agent in node.acting]
