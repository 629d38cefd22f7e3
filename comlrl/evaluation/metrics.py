"""Trees → the metrics of a step or an evaluation. Pure; every name is in ``docs/metrics.md``.

Rewards are raw (``Score.value``), before ``reward_processor``. A mean over a turn counts each
task alike, and within a task each path of the tree alike: a branch with many joint actions does
not outweigh one that ended early.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from comlrl.tasks.prompts import roles
from comlrl.types import AgentTurn, Node, RewardBreakdown, Score, Tree

REWARD_PARTS = (
    "aux_defined",
    "main_defined",
    "syntax",
    "tests",
    "uses_aux",
    "not_wrapper",
    "aux_ignored",
)


class Conventions(Protocol):
    """Reads from code how a team shares the work; ``comlrl.builtin.conventions`` does, as it is."""

    def convention(self, source: str, name: str = ...) -> str | None: ...

    def expected_convention(
        self, source: str, entry_point: str, stages: str | None = ...
    ) -> str | None: ...


@dataclass(frozen=True, slots=True)
class _Weighted:
    """A node and its share of its task's probability mass at the turn looked at."""

    tree: Tree
    node: Node
    weight: float


def tree_metrics(trees: Sequence[Tree], conventions: Conventions | None = None) -> dict[str, float]:
    """Metrics of scored trees: of each turn under ``turn_T/…``, and bare of the last turn reached.

    The last turn reached is made of the nodes without children: those of the final turn and
    those where a branch was terminated. ``conventions``: given on CoopMini, where several ways of
    sharing the work are known. ``trees`` empty: an empty dict.
    """
    weighted = [item for tree in trees for item in _weighted_nodes(tree)]
    if not weighted:
        return {}
    metrics: dict[str, float] = {}
    for turn in sorted({item.node.turn for item in weighted}):
        at_turn = _node_metrics([item for item in weighted if item.node.turn == turn])
        metrics.update({f"turn_{turn}/{name}": value for name, value in at_turn.items()})
    last = [item for tree in trees for item in _leaves(tree)]
    metrics.update(_node_metrics(last))
    if "task_reward_mean" in metrics:
        metrics.update(order_agreement(trees))
    for i, agent in enumerate(_completion_metrics(last)):
        metrics.update({f"agent_{i}/{name}": value for name, value in agent.items()})
    if conventions is not None and len(last[0].node.agents_N) > 1:
        metrics.update(_convention_metrics(last, conventions))
    metrics["turns_mean"] = _mean((item.node.turn, item.weight) for item in last)
    metrics["tasks"] = float(len({tree.task.task_id for tree in trees}))
    metrics["joint_actions"] = float(sum(len(item.node.scores_K) for item in weighted))
    return metrics


def order_agreement(trees: Sequence[Tree]) -> dict[str, float]:
    """Of the sibling joint actions whose task rewards differ, the share that the score (the
    reward that was trained on) orders likewise: how far the model still holds where the policies
    have moved to. Nothing where no two differ."""
    right = count = 0
    for node in (node for tree in trees for node in tree.nodes):
        known = [(s.value, s.breakdown.total) for s in node.scores_K if s.breakdown is not None]
        for i, (score, task) in enumerate(known):
            for other_score, other_task in known[:i]:
                if abs(task - other_task) > 1e-9:
                    count += 1
                    right += (score - other_score) * (task - other_task) > 0
    return {"reward_model/order_agreement": right / count} if count else {}


def task_reward(tree: Tree) -> float:
    """A task's mean raw reward at the last turn reached."""
    return _mean(
        (score.value, weight)
        for item in _leaves(tree)
        for score, weight in zip(item.node.scores_K, _shares(item), strict=True)
    )


def _weighted_nodes(tree: Tree) -> list[_Weighted]:
    """Every node with its path weight: the root 1, siblings an equal share of their parent's."""
    children = [0] * len(tree.nodes)
    for node in tree.nodes:
        if node.parent >= 0:
            children[node.parent] += 1
    weights: list[float] = []
    for node in tree.nodes:  # breadth-first: a parent stands before its children
        weights.append(1.0 if node.parent < 0 else weights[node.parent] / children[node.parent])
    return [_Weighted(tree, n, w) for n, w in zip(tree.nodes, weights, strict=True)]


def _leaves(tree: Tree) -> list[_Weighted]:
    parents = {node.parent for node in tree.nodes}
    return [item for i, item in enumerate(_weighted_nodes(tree)) if i not in parents]


def _shares(item: _Weighted) -> list[float]:
    count = len(item.node.scores_K)
    return [item.weight / count] * count


def _node_metrics(items: Sequence[_Weighted]) -> dict[str, float]:
    scored = [
        (item, score, processed, share)
        for item in items
        for score, processed, share in zip(
            item.node.scores_K, item.node.rewards_K, _shares(item), strict=True
        )
    ]
    mean = _mean((score.value, share) for _, score, _, share in scored)
    variance = _mean(((score.value - mean) ** 2, share) for _, score, _, share in scored)
    metrics = {
        "reward_mean": mean,
        "reward_std": math.sqrt(variance),
        "processed_reward_mean": _mean((processed, share) for _, _, processed, share in scored),
        "termination_share": _mean((item.node.terminated, item.weight) for item in items),
    }
    metrics.update(_program_metrics([(item, score, share) for item, score, _, share in scored]))
    per_agent = _completion_metrics(items)
    for name in per_agent[0]:
        metrics[name] = math.fsum(agent[name] for agent in per_agent) / len(per_agent)
    return metrics


def _program_metrics(scored: Sequence[tuple[_Weighted, Score, float]]) -> dict[str, float]:
    """What the breakdowns say; nothing where rewards did not come from running code."""
    known = [
        (item, score, score.breakdown, share)
        for item, score, share in scored
        if score.breakdown is not None
    ]
    if not known:
        return {}
    programs = [(breakdown, share) for _, _, breakdown, share in known]
    metrics = {
        f"reward/{part}": _mean((getattr(breakdown, part), share) for breakdown, share in programs)
        for part in REWARD_PARTS
    }
    if any(abs(score.value - breakdown.total) > 1e-9 for _, score, breakdown, _ in known):
        metrics["task_reward_mean"] = _mean((b.total, share) for b, share in programs)
    metrics |= {
        "pass_rate": _mean((b.passed_all, share) for b, share in programs),
        "test_fraction": _mean((b.test_fraction, share) for b, share in programs),
        "syntax_rate": _mean((b.syntax > 0, share) for b, share in programs),
        "main_defined_rate": _mean(
            (item.tree.task.entry_point in b.defined, share) for item, _, b, share in known
        ),
        "timeout_rate": _mean((any(o.timed_out for o in b.outcomes), s) for b, s in programs),
        "reward_seconds_mean": _mean((b.seconds, share) for b, share in programs),
    }
    metrics.update(_aux_metrics([(b, share) for b, share in programs if b.helpers]))
    return metrics


def _aux_metrics(programs: Sequence[tuple[RewardBreakdown, float]]) -> dict[str, float]:
    """How helpers are used; shares are of helpers, except ``wrapper_rate``: of programs."""
    if not programs:
        return {}
    measured = [(b.helpers, b.needed, share) for b, share in programs if b.needed is not None]
    need = ((_share(helpers, needed), share) for helpers, needed, share in measured)
    return ({"aux_needed_rate": _mean(need)} if measured else {}) | {
        "aux_defined_rate": _mean((_share(b.helpers, b.defined), share) for b, share in programs),
        "aux_called_rate": _mean((_share(b.helpers, b.called), share) for b, share in programs),
        "aux_ignored_rate": _mean((_share(b.helpers, b.ignored), share) for b, share in programs),
        "wrapper_rate": _mean((b.wrapper, share) for b, share in programs),
    }


def _convention_metrics(items: Sequence[_Weighted], read: Conventions) -> dict[str, float]:
    """Shares of joint actions by what each helper does and by what main takes aux to do."""
    shares: defaultdict[str, float] = defaultdict(float)
    match = 0.0
    for item in items:
        task, share = item.tree.task, _shares(item)[0]
        names = roles(len(item.node.agents_N))
        for action in item.node.joint_actions_K:
            texts = [
                agent.completions_G[g].text
                for agent, g in zip(item.node.agents_N, action, strict=True)
            ]
            followed = [
                read.convention(text, name)
                for text, name in zip(texts[:-1], names[:-1], strict=True)
            ]
            expected = read.expected_convention(
                texts[-1], task.entry_point, task.extra.get("stages")
            )
            for name, kind in zip(names, (*followed, expected), strict=True):
                shares[f"convention/{name}/{kind or 'none'}"] += share
            match += share * (expected is not None and expected == followed[0])
    mass = sum(item.weight for item in items)
    means = {name: share / mass for name, share in sorted(shares.items())}
    return means | {"convention_match_rate": match / mass}


def _completion_metrics(items: Sequence[_Weighted]) -> list[dict[str, float]]:
    """Lengths, truncation and duplicates of each agent's completions."""
    return [
        _agent_metrics([(item.node.agents_N[i], item.weight) for item in items])
        for i in range(len(items[0].node.agents_N))
    ]


def _agent_metrics(turns: Sequence[tuple[AgentTurn, float]]) -> dict[str, float]:
    completions = [
        (completion, weight / len(turn.completions_G))
        for turn, weight in turns
        for completion in turn.completions_G
    ]
    return {
        "completion_length_mean": _mean((len(c.token_ids), share) for c, share in completions),
        "truncation_share": _mean((not c.finished, share) for c, share in completions),
        "duplicate_share": _mean((_duplicates(turn), weight) for turn, weight in turns),
        "history_dropped_share": _mean((turn.turns_dropped > 0, weight) for turn, weight in turns),
    }


def _duplicates(turn: AgentTurn) -> float:
    """Share of a node's completions whose text an earlier sibling already has."""
    texts = [completion.text for completion in turn.completions_G]
    return 1.0 - len(set(texts)) / len(texts)


def _share(helpers: Sequence[str], named: Iterable[str]) -> float:
    return len(set(helpers) & set(named)) / len(helpers)


def _mean(values: Iterable[tuple[float, float]]) -> float:
    """Weighted mean of (value, weight) pairs, summed without rounding on the way."""
    pairs = list(values)
    return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
