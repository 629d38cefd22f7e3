"""A rollout's outcomes: its scores and completions, each with a share of its task.

A task has mass 1 at each turn, divided equally among branches: a branch with many joint actions
does not outweigh one that ended early. All nodes after a turn share the mass of its branches that
continue: with ``handoff``, a joint action also represents those of its turn that were not
continued. The episodes of a program share the mass equally; an episode is one turn.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple

from comlrl.types import AgentTurn, EpisodeGroup, JointAction, RolloutResult, Score, Tree


class Answers(NamedTuple):
    """An agent's completions of one prompt."""

    number: int  # identifies the prompt within the task
    agent: int
    turn: AgentTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Joint actions that were scored together: those of a node, or that of an episode."""

    turn: int
    weight: float  # share of the task at this turn
    last: bool  # no turn follows
    scores_K: tuple[Score, ...]
    rewards_K: tuple[float, ...]  # processed
    actions_K: tuple[JointAction | None, ...]  # None: not scored by the run's reward
    answers: tuple[Answers, ...]  # that led to it in its turn
    terminated: bool | None = None  # whether its branch ended early; None: an episode
    error: str | None = None  # why an episode failed

    @property
    def shares_K(self) -> list[float]:
        count = len(self.scores_K)
        return [self.weight / count] * count


@singledispatch
def outcomes(result: RolloutResult) -> list[Outcome]:
    """Return the outcomes of a rollout, in order of its nodes or episodes."""
    raise TypeError(f"no rollout: {result!r}")


@outcomes.register
def _of_tree(tree: Tree) -> list[Outcome]:
    starts, weights = tree.turn_starts(), list[float]()
    stages = Counter(node.parent for node in tree.nodes)
    turns = Counter(starts[n.parent] for n in tree.nodes if n.parent >= 0 and not n.first_agent)
    continued: defaultdict[int, float] = defaultdict(float)  # weight, by where the turn began
    node_outcomes = []
    for index, node in enumerate(tree.nodes):  # breadth-first: parents come before their children
        if node.parent < 0:
            weights.append(1.0)
        elif node.first_agent:
            weights.append(weights[node.parent] / stages[node.parent])
        else:
            start = starts[node.parent]
            weights.append(continued[start] / turns[start])
        if not node.scores_K:
            continue
        if not node.terminated:
            continued[starts[index]] += weights[index]
        node_outcomes.append(
            Outcome(
                turn=node.turn,
                weight=weights[index],
                last=node.terminated or not turns[starts[index]],
                scores_K=node.scores_K,
                rewards_K=node.rewards_K,
                actions_K=tuple(tree.joint_action(index, k) for k in range(len(node.scores_K))),
                answers=tuple(_of_turn(tree, index)),
                terminated=node.terminated,
            )
        )
    return node_outcomes


def _of_turn(tree: Tree, index: int) -> Iterator[Answers]:
    """Yield the answers at a node, then those at earlier nodes of its turn."""
    node = tree.nodes[index]
    for agent, turn in zip(node.acting, node.agents_N, strict=True):
        yield Answers(index * tree.num_agents + agent, agent, turn)
    if node.first_agent:
        yield from _of_turn(tree, node.parent)


@outcomes.register
def _of_episodes(group: EpisodeGroup) -> list[Outcome]:
    episode_outcomes, numbers = [], itertools.count()
    for episode in group.episodes_G:
        episode_outcomes.append(
            Outcome(
                turn=1,
                weight=1 / len(group.episodes_G),
                last=True,
                scores_K=(episode.score,),
                rewards_K=(episode.reward,),
                actions_K=(episode.joint_action,),
                answers=tuple(Answers(next(numbers), c.agent, c.as_turn) for c in episode.calls),
                error=episode.error,
            )
        )
    return episode_outcomes
