"""Nodes of trees made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comlrl.types import AgentTurn, Node, Score


def node(
    turns: Sequence[AgentTurn],
    scores: Sequence[Score | float] = (),
    joint: Sequence[tuple[int, ...]] | None = None,
    *,
    turn: int = 1,
    parent: int = -1,
    action: int = -1,
    **more: Any,
) -> Node:
    """A node of the agents' turns; joint actions are aligned, processed rewards the raw ones."""
    scored = tuple(s if isinstance(s, Score) else Score(s) for s in scores)
    generations = range(len(turns[0].completions_G))
    aligned = tuple((g,) * len(turns) for g in generations)
    return Node(
        turn=turn,
        parent=parent,
        parent_action=action,
        agents_N=tuple(turns),
        joint_actions_K=aligned if joint is None else tuple(joint),
        scores_K=scored,
        rewards_K=tuple(score.value for score in scored),
        **more,
    )
