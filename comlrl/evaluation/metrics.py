"""Computes metrics of a step or an evaluation from rollouts; ``docs/metrics.md`` lists all names.

Rewards are raw (``Score.value``), before ``reward_processor``. A mean over a turn weights all tasks
equally, and within a task all paths of the tree, or all episodes, equally.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from comlrl.evaluation.outcomes import Answers, Outcome, outcomes
from comlrl.types import AgentTurn, Domain, RolloutResult

OF_TURN = re.compile(r"^turn_\d+/(.+)$")
OF_AGENT = re.compile(r"^agent_\d+/")
OF_TREES = frozenset(  # metrics of a turn that do not depend on the domain
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


def tree_metrics(rolled: Sequence[RolloutResult], domain: Domain) -> dict[str, float]:
    """Compute metrics of scored rollouts: of each turn with the prefix ``turn_T/``, and of the last
    turn reached without a prefix.

    The last turn reached consists of the joint actions that are not followed by others, in the
    final turn or where a branch was terminated; and of all episodes. Metrics that no joint action
    defines are left out. The result is empty if ``rolled`` is.
    """
    of_tasks = [outcomes(result) for result in rolled]
    if not any(of_tasks):
        return {}
    all_outcomes = [outcome for of_task in of_tasks for outcome in of_task]
    agents, metrics = rolled[0].num_agents, dict[str, float]()
    for turn in sorted({outcome.turn for outcome in all_outcomes}):
        at_turn = [[o for o in of_task if o.turn == turn] for of_task in of_tasks]
        for name, value in _turn_metrics(at_turn, domain, agents).items():
            metrics[f"turn_{turn}/{name}"] = value
    last = [[o for o in of_task if o.last] for of_task in of_tasks]
    metrics |= _turn_metrics(last, domain, agents)
    metrics |= order_agreement(all_outcomes) if "task_reward_mean" in metrics else {}
    per_agent = _completion_metrics(last, agents)
    metrics |= _over_agents(per_agent)
    for i, agent in enumerate(per_agent):
        metrics |= {f"agent_{i}/{name}": value for name, value in agent.items()}
    ends = [outcome for of_task in last for outcome in of_task]
    if ends[0].terminated is None:
        metrics["calls_mean"] = weighted_mean((len(o.answers), o.weight) for o in ends)
        metrics["failed_share"] = weighted_mean((o.error is not None, o.weight) for o in ends)
    else:
        metrics |= _convention_metrics(ends, domain)
    metrics["turns_mean"] = weighted_mean((o.turn, o.weight) for o in ends)
    metrics["tasks"] = float(len({result.task.task_id for result in rolled}))
    metrics["joint_actions"] = float(sum(len(outcome.scores_K) for outcome in all_outcomes))
    return metrics


def measures(names: Iterable[str]) -> list[str]:
    """Return which of a record's names are the domain's own measures: those that are logged by
    turn, and are neither parts of the reward nor metrics of every domain."""
    of_turns = dict.fromkeys(match[1] for name in names if (match := OF_TURN.match(name)))
    return [
        name
        for name in of_turns
        if name not in OF_TREES and not OF_AGENT.match(name) and not name.startswith("reward/")
    ]


def order_agreement(all_outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Compute the share of pairs of sibling joint actions that the score (the reward model's) and
    the task reward order the same way. It shows whether the reward model is still valid for the
    current policies. Empty if no task rewards differ."""
    right = count = 0
    for outcome in all_outcomes:
        scores = [(s.value, s.task_reward) for s in outcome.scores_K if s.task_reward is not None]
        for i, (score, task) in enumerate(scores):
            for other_score, other_task in scores[:i]:
                if abs(task - other_task) > 1e-9:
                    count += 1
                    right += (score - other_score) * (task - other_task) > 0
    return {"reward_model/order_agreement": right / count} if count else {}


def task_reward(result: RolloutResult) -> float:
    """Return a task's mean raw reward at the last turn reached."""
    return weighted_mean(
        (score.value, share)
        for outcome in outcomes(result)
        if outcome.last
        for score, share in zip(outcome.scores_K, outcome.shares_K, strict=True)
    )


def weighted_mean(values: Iterable[tuple[float, float]]) -> float:
    """Compute the mean of (value, weight) pairs, without rounding intermediate sums."""
    pairs = list(values)
    return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)


def _turn_metrics(
    of_tasks: Sequence[Sequence[Outcome]], domain: Domain, num_agents: int
) -> dict[str, float]:
    """Compute metrics of the outcomes of one turn, or of the last turn of each branch."""
    all_outcomes = [outcome for of_task in of_tasks for outcome in of_task]
    scored = [
        (score, processed, share)
        for outcome in all_outcomes
        for score, processed, share in zip(
            outcome.scores_K, outcome.rewards_K, outcome.shares_K, strict=True
        )
    ]
    mean = weighted_mean((score.value, share) for score, _, share in scored)
    variance = weighted_mean(((score.value - mean) ** 2, share) for score, _, share in scored)
    metrics = {
        "reward_mean": mean,
        "reward_std": math.sqrt(variance),
        "processed_reward_mean": weighted_mean((reward, share) for _, reward, share in scored),
    }
    metrics |= _score_metrics(all_outcomes, domain)
    if all_outcomes[0].terminated is not None:
        metrics["termination_share"] = weighted_mean(
            (bool(o.terminated), o.weight) for o in all_outcomes
        )
        metrics |= _over_agents(_completion_metrics(of_tasks, num_agents))
    return metrics


def _score_metrics(all_outcomes: Sequence[Outcome], domain: Domain) -> dict[str, float]:
    """Compute means of the scores' parts and flags, and of the domain's measures."""
    values: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for outcome in all_outcomes:
        for action, score, share in zip(
            outcome.actions_K, outcome.scores_K, outcome.shares_K, strict=True
        ):
            measured = {f"reward/{name}": value for name, value in score.parts.items()}
            if score.task_reward is not None:
                measured["task_reward_mean"] = score.task_reward
            if score.passed is not None:
                measured["pass_rate"] = float(score.passed)
            for agent, agent_reward in enumerate(score.by_agent or ()):
                measured[f"agent_{agent}/reward_mean"] = agent_reward
            if action is not None:
                measured |= domain.measures(action, score)
            for name, value in measured.items():
                values[name].append((value, share))
    return {name: weighted_mean(pairs) for name, pairs in values.items()}


def _convention_metrics(all_outcomes: Sequence[Outcome], domain: Domain) -> dict[str, float]:
    """Compute the shares of each agent's conventions, and how often all agents' match."""
    shares: defaultdict[str, float] = defaultdict(float)
    match, judged = 0.0, []
    for outcome in all_outcomes:
        for action, share in zip(outcome.actions_K, outcome.shares_K, strict=True):
            if action is None or (followed := domain.conventions(action)) is None:
                continue
            roles = domain.roles(len(action.completions_N))
            for role, kind in zip(roles, followed.kind_N, strict=True):
                shares[f"convention/{role}/{kind or 'none'}"] += share
            match += share * followed.match
            judged.append(share)
    if not judged:
        return {}
    mass = math.fsum(judged)
    means = {name: share / mass for name, share in sorted(shares.items())}
    return means | {"convention_match_rate": match / mass}


def _completion_metrics(
    of_tasks: Sequence[Sequence[Outcome]], num_agents: int
) -> list[dict[str, float]]:
    """Compute lengths, truncation and duplicates of each agent's completions; in programs also its
    number of calls, but no duplicates, and lengths only if there are calls."""
    turns_N: list[list[tuple[AgentTurn, float]]] = [[] for _ in range(num_agents)]
    for of_task in of_tasks:
        weights: defaultdict[int, float] = defaultdict(float)
        numbered: dict[int, Answers] = {}
        for outcome in of_task:
            for answers in outcome.answers:
                numbered[answers.number] = answers
                weights[answers.number] += outcome.weight
        for number, answers in numbered.items():
            turns_N[answers.agent].append((answers.turn, weights[number]))
    all_outcomes = [outcome for of_task in of_tasks for outcome in of_task]
    if all_outcomes[0].terminated is not None:
        return [_agent_metrics(turns) | _sibling_metrics(turns) for turns in turns_N]
    mass = math.fsum(outcome.weight for outcome in all_outcomes)
    return [
        {"calls_mean": math.fsum(w for _, w in turns) / mass}
        | (_agent_metrics(turns) if turns else {})
        for turns in turns_N
    ]


def _agent_metrics(weighted: Sequence[tuple[AgentTurn, float]]) -> dict[str, float]:
    completions = [
        (completion, weight / len(turn.completions_G))
        for turn, weight in weighted
        for completion in turn.completions_G
    ]
    metrics = {
        "truncation_share": weighted_mean((not c.finished, share) for c, share in completions)
    }
    if all(c.token_ids or not c.text for c, _ in completions):  # API services return no tokens
        metrics["completion_length_mean"] = weighted_mean(
            (len(c.token_ids), share) for c, share in completions
        )
    return metrics


def _sibling_metrics(weighted: Sequence[tuple[AgentTurn, float]]) -> dict[str, float]:
    return {
        "duplicate_share": weighted_mean((_duplicates(turn), weight) for turn, weight in weighted),
        "history_dropped_share": weighted_mean(
            (turn.turns_dropped > 0, weight) for turn, weight in weighted
        ),
    }


def _duplicates(turn: AgentTurn) -> float:
    """Compute the share of a node's completions that repeat an earlier sibling's text."""
    texts = [completion.text for completion in turn.completions_G]
    return 1.0 - len(set(texts)) / len(texts)


def _over_agents(metrics_N: Sequence[dict[str, float]]) -> dict[str, float]:
    """Compute the mean of each metric over the agents that define it."""
    names = dict.fromkeys(name for metrics in metrics_N for name in metrics)
    having = {name: [m[name] for m in metrics_N if name in m] for name in names}
    return {name: math.fsum(values) / len(values) for name, values in having.items()}
