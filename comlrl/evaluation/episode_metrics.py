"""Episodes of programs → the metrics of a step or an evaluation, by the names that trees have.

A mean counts each task alike, and within a task each episode alike. An episode counts as one turn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from comlrl.types import Call, Domain, Episode, EpisodeGroup

Pairs = list[tuple[float, float]]  # (value, weight)


def episode_metrics(groups: Sequence[EpisodeGroup], domain: Domain) -> dict[str, float]:
    """Metrics of scored episodes; those of rewards stand under ``turn_1/…`` too.

    ``groups`` empty: an empty dict.
    """
    if not groups:
        return {}
    weighted = [(e, 1 / len(group.episodes_G)) for group in groups for e in group.episodes_G]
    scores = _score_metrics(weighted, domain)
    metrics = {f"turn_1/{name}": value for name, value in scores.items()} | scores
    agents = [_agent_metrics(weighted, agent) for agent in range(groups[0].num_agents)]
    for name in agents[0]:
        known = [own[name] for own in agents if name in own]
        metrics[name] = math.fsum(known) / len(known)
    for i, own in enumerate(agents):
        metrics |= {f"agent_{i}/{name}": value for name, value in own.items()}
    metrics["calls_mean"] = weighted_mean((len(episode.calls), w) for episode, w in weighted)
    metrics["failed_share"] = weighted_mean(
        (episode.error is not None, w) for episode, w in weighted
    )
    metrics["turns_mean"] = 1.0
    metrics["tasks"] = float(len({group.task.task_id for group in groups}))
    metrics["joint_actions"] = float(len(weighted))
    return metrics


def mean_reward(group: EpisodeGroup) -> float:
    """A task's mean raw reward."""
    return math.fsum(e.score.value for e in group.episodes_G) / len(group.episodes_G)


def _score_metrics(weighted: Sequence[tuple[Episode, float]], domain: Domain) -> dict[str, float]:
    """What the scores say, and what the domain measures where the run's own reward was asked."""
    values: defaultdict[str, Pairs] = defaultdict(list)
    for episode, weight in weighted:
        score = episode.score
        measured = {"reward_mean": score.value, "processed_reward_mean": episode.reward}
        measured |= {f"reward/{name}": value for name, value in score.parts.items()}
        if score.passed is not None:
            measured["pass_rate"] = float(score.passed)
        for agent, own in enumerate(score.by_agent or ()):
            measured[f"agent_{agent}/reward_mean"] = own
        if episode.joint_action is not None:
            measured |= domain.measures(episode.joint_action, score)
        for name, value in measured.items():
            values[name].append((value, weight))
    metrics = {name: weighted_mean(pairs) for name, pairs in values.items()}
    mean = metrics["reward_mean"]
    spread = weighted_mean(((episode.score.value - mean) ** 2, w) for episode, w in weighted)
    return metrics | {"reward_std": math.sqrt(spread)}


def _agent_metrics(weighted: Sequence[tuple[Episode, float]], agent: int) -> dict[str, float]:
    """Of an agent's calls; their lengths are left out where it has none."""
    calls: list[tuple[Call, float]] = [(c, w) for e, w in weighted for c in e.calls_of(agent)]
    total = math.fsum(w for _, w in weighted)
    metrics = {"calls_mean": math.fsum(w for _, w in calls) / total}
    if calls:
        metrics["completion_length_mean"] = weighted_mean(
            (len(c.completion.token_ids), w) for c, w in calls
        )
        metrics["truncation_share"] = weighted_mean(
            (not c.completion.finished, w) for c, w in calls
        )
    return metrics


def weighted_mean(values: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight) pairs, summed without rounding on the way."""
    pairs = list(values)
    return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
