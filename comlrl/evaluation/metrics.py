"""Trees → the metrics of a step or an evaluation. Pure; every name is in ``docs/metrics.md``.

Rewards are raw (``Score.value``), before ``reward_processor``. A mean over a turn counts each
task alike, and within a task each path of the tree alike: a branch with many joint actions does
not outweigh one that ended early.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from comlrl.evaluation.episode_metrics import episode_metrics, mean_reward, weighted_mean
from comlrl.types import AgentTurn, Domain, EpisodeGroup, JointAction, Node, RolloutResult, Tree

OF_TURN = re.compile(r"^turn_\d+/(.+)$")
OF_AGENT = re.compile(r"^agent_\d+/")
OF_TREES = frozenset(  # what trees of every domain say of each turn
    {
        "reward_mean",
        "reward_std",
        "processed_reward_mean",
        "task_reward_mean",
        "pass_rate",
        "termination_share",
        "completion_length_mean",
        "truncation_share",
        "duplicate_share",
        "history_dropped_share",
    }
)


@dataclass(frozen=True, slots=True)
class _Weighted:
    """A scored node and its share of its task's probability mass at the turn looked at."""

    tree: Tree
    index: int
    weight: float
    last: bool  # nothing follows

    @property
    def node(self) -> Node:
        return self.tree.nodes[self.index]


def tree_metrics(trees: Sequence[RolloutResult], domain: Domain) -> dict[str, float]:
    """Metrics of scored trees: of each turn under ``turn_T/…``, and bare of the last turn reached.

    The last turn reached is made of the scored nodes that nothing follows: those of the final turn
    and those where a branch was terminated. A metric that no joint action gives is left out.
    ``trees`` empty: an empty dict. Groups of episodes have ``episode_metrics``.
    """
    if groups := [tree for tree in trees if isinstance(tree, EpisodeGroup)]:
        return episode_metrics(groups, domain)
    return _tree_metrics([tree for tree in trees if isinstance(tree, Tree)], domain)


def _tree_metrics(trees: Sequence[Tree], domain: Domain) -> dict[str, float]:
    weighted = [item for tree in trees for item in _scored_nodes(tree)]
    if not weighted:
        return {}
    metrics: dict[str, float] = {}
    for turn in sorted({item.node.turn for item in weighted}):
        at_turn = _node_metrics([item for item in weighted if item.node.turn == turn], domain)
        metrics.update({f"turn_{turn}/{name}": value for name, value in at_turn.items()})
    last = [item for tree in trees for item in _leaves(tree)]
    metrics.update(_node_metrics(last, domain))
    if "task_reward_mean" in metrics:
        metrics.update(order_agreement(trees))
    for i, agent in enumerate(_completion_metrics(last)):
        metrics.update({f"agent_{i}/{name}": value for name, value in agent.items()})
    metrics.update(_convention_metrics(last, domain))
    metrics["turns_mean"] = weighted_mean((item.node.turn, item.weight) for item in last)
    metrics["tasks"] = float(len({tree.task.task_id for tree in trees}))
    metrics["joint_actions"] = float(sum(len(item.node.scores_K) for item in weighted))
    return metrics


def measures(names: Iterable[str]) -> list[str]:
    """Of a record's names, those of what the domain measures: they are logged for each turn, as all
    that trees say, and are neither parts of the reward nor what trees of every domain say."""
    of_turns = dict.fromkeys(found[1] for name in names if (found := OF_TURN.match(name)))
    own = [n for n in of_turns if n not in OF_TREES and not OF_AGENT.match(n)]
    return [n for n in own if not n.startswith("reward/")]


def order_agreement(trees: Sequence[Tree]) -> dict[str, float]:
    """Of the sibling joint actions whose task rewards differ, the share that the score (the
    reward that was trained on) orders likewise: how far the model still holds where the policies
    have moved to. Nothing where no two differ."""
    right = count = 0
    for node in (node for tree in trees for node in tree.nodes):
        known = [(s.value, s.task_reward) for s in node.scores_K if s.task_reward is not None]
        for i, (score, task) in enumerate(known):
            for other_score, other_task in known[:i]:
                if abs(task - other_task) > 1e-9:
                    count += 1
                    right += (score - other_score) * (task - other_task) > 0
    return {"reward_model/order_agreement": right / count} if count else {}


def task_reward(tree: RolloutResult) -> float:
    """A task's mean raw reward at the last turn reached."""
    if isinstance(tree, EpisodeGroup):
        return mean_reward(tree)
    return weighted_mean(
        (score.value, weight)
        for item in _leaves(tree)
        for score, weight in zip(item.node.scores_K, _shares(item), strict=True)
    )


def _scored_nodes(tree: Tree) -> list[_Weighted]:
    """Every scored node with its path weight: 1 for the root, shared equally by what follows.

    All nodes that follow a turn share its continued weight: with ``handoff``, one joint action
    stands for those of its turn that were not handed on.
    """
    starts, weights = tree.turn_starts(), []
    stages = Counter(node.parent for node in tree.nodes)
    turns = Counter(starts[n.parent] for n in tree.nodes if n.parent >= 0 and not n.first_agent)
    continued: defaultdict[int, float] = defaultdict(float)  # weight, by where the turn began
    for index, node in enumerate(tree.nodes):  # breadth-first: a parent stands before its children
        if node.parent < 0:
            weights.append(1.0)
        elif node.first_agent:
            weights.append(weights[node.parent] / stages[node.parent])
        else:
            start = starts[node.parent]
            weights.append(continued[start] / turns[start])
        if node.scores_K and not node.terminated:
            continued[starts[index]] += weights[index]
    return [
        _Weighted(tree, i, weights[i], last=node.terminated or not turns[starts[i]])
        for i, node in enumerate(tree.nodes)
        if node.scores_K
    ]


def _leaves(tree: Tree) -> list[_Weighted]:
    return [item for item in _scored_nodes(tree) if item.last]


def _shares(item: _Weighted) -> list[float]:
    count = len(item.node.scores_K)
    return [item.weight / count] * count


def _node_metrics(items: Sequence[_Weighted], domain: Domain) -> dict[str, float]:
    scored = [
        (item, score, processed, share)
        for item in items
        for score, processed, share in zip(
            item.node.scores_K, item.node.rewards_K, _shares(item), strict=True
        )
    ]
    mean = weighted_mean((score.value, share) for _, score, _, share in scored)
    variance = weighted_mean(((score.value - mean) ** 2, share) for _, score, _, share in scored)
    metrics = {
        "reward_mean": mean,
        "reward_std": math.sqrt(variance),
        "processed_reward_mean": weighted_mean(
            (processed, share) for _, _, processed, share in scored
        ),
        "termination_share": weighted_mean((item.node.terminated, item.weight) for item in items),
    }
    metrics.update(_score_metrics(items, domain))
    per_agent = _completion_metrics(items)
    for name in per_agent[0]:
        metrics[name] = math.fsum(agent[name] for agent in per_agent) / len(per_agent)
    return metrics


def _score_metrics(items: Sequence[_Weighted], domain: Domain) -> dict[str, float]:
    """What the scores say beyond their values, and what the domain measures."""
    values: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for item in items:
        for action, score, share in zip(
            _joint_actions(item), item.node.scores_K, _shares(item), strict=True
        ):
            measured = {f"reward/{name}": value for name, value in score.parts.items()}
            if score.task_reward is not None:
                measured["task_reward_mean"] = score.task_reward
            if score.passed is not None:
                measured["pass_rate"] = float(score.passed)
            for agent, own in enumerate(score.by_agent or ()):
                measured[f"agent_{agent}/reward_mean"] = own
            for name, value in (measured | dict(domain.measures(action, score))).items():
                values[name].append((value, share))
    return {name: weighted_mean(pairs) for name, pairs in values.items()}


def _joint_actions(item: _Weighted) -> list[JointAction]:
    count = len(item.node.scores_K)
    return [item.tree.joint_action(item.index, action) for action in range(count)]


def _convention_metrics(items: Sequence[_Weighted], domain: Domain) -> dict[str, float]:
    """Shares of joint actions by how each agent shared the work, and whether that fitted."""
    shares: defaultdict[str, float] = defaultdict(float)
    match, known = 0.0, []
    for item in items:
        roles, share = domain.roles(item.node.acting.stop), _shares(item)[0]
        for action in _joint_actions(item):
            if (found := domain.conventions(action)) is None:
                continue
            for role, kind in zip(roles, found.kind_N, strict=True):
                shares[f"convention/{role}/{kind or 'none'}"] += share
            match += share * found.match
            known.append(share)
    if not known:
        return {}
    mass = math.fsum(known)
    means = {name: share / mass for name, share in sorted(shares.items())}
    return means | {"convention_match_rate": match / mass}


def _completion_metrics(items: Sequence[_Weighted]) -> list[dict[str, float]]:
    """Lengths, truncation and duplicates of each agent's completions."""
    weights: dict[tuple[int, int], float] = {}  # of these nodes, and of those before in their turns
    agents: defaultdict[int, list[tuple[AgentTurn, float]]] = defaultdict(list)
    nodes = {}
    for item in items:
        index = item.index
        while True:
            nodes[id(item.tree), index] = node = item.tree.nodes[index]
            weights[id(item.tree), index] = weights.get((id(item.tree), index), 0) + item.weight
            if node.first_agent == 0:
                break
            index = node.parent
    for place, node in nodes.items():
        for agent, turn in zip(node.acting, node.agents_N, strict=True):
            agents[agent].append((turn, weights[place]))
    return [_agent_metrics(agents[agent]) for agent in sorted(agents)]


def _agent_metrics(turns: Sequence[tuple[AgentTurn, float]]) -> dict[str, float]:
    completions = [
        (completion, weight / len(turn.completions_G))
        for turn, weight in turns
        for completion in turn.completions_G
    ]
    return {
        "completion_length_mean": weighted_mean(
            (len(c.token_ids), share) for c, share in completions
        ),
        "truncation_share": weighted_mean((not c.finished, share) for c, share in completions),
        "duplicate_share": weighted_mean((_duplicates(turn), weight) for turn, weight in turns),
        "history_dropped_share": weighted_mean(
            (turn.turns_dropped > 0, weight) for turn, weight in turns
        ),
    }


def _duplicates(turn: AgentTurn) -> float:
    """Share of a node's completions whose text an earlier sibling already has."""
    texts = [completion.text for completion in turn.completions_G]
    return 1.0 - len(set(texts)) / len(texts)
