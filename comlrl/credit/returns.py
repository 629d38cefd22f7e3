"""Tree → the return of each joint action → the return of each agent's completion.

    R_k(t) = r_k + γ · (mean joint return of the child of k; 0 if k has no child)

If each agent has its own reward (``Score.by_agent``), r_k and R_k are that agent's.

In a sequential turn r_k is 0 until the last agent has acted, and γ applies only between turns: an
agent's return is the mean return of the joint actions that follow within the turn.

With ``handoff``, m of a turn's K joint actions have children (m is ``handoff_width``). F_k is the
mean return of k's child, and F̄ is the mean of the m futures:

    R_k = r_k + γ F̄ + γ (K − 1)/(m − 1) · (F_k − F̄)    if k has a child
    R_k = r_k + γ F̄                                     otherwise

If the m are drawn at random, the expected R_k is the full tree's, and so are the expected
advantages ``mean`` and ``rloo``, which are linear in it. The factor is needed because k has a
child in only m of K draws, and because F̄ then includes F_k. ``best`` is biased. With m = 1 all
joint actions are credited with the same future, which cancels in the sibling baseline: γ then has
no effect, and a turn learns only from its own reward. With m = K it is the full tree. (A departure
from MAGRPO's paper.)

In a program, the return of agent i from its j-th call, with rewards r_m received after m calls, is

    R_ij = Σ_{m ≥ j} γ^(m − j) r_m + γ^max(0, n − j) r_final,   n = its calls in the episode

γ applies once per call of the agent. The baseline of a j-th call is computed from the same sums in
all G episodes of the task, even if the agent made fewer calls there: then only the final reward
counts. The effect on the expected gradient E[Â_ij ∇ log π] depends on the kind of baseline:

- ``rloo``, ``greedy``, ``raw``: unbiased. The other episodes, the greedy one and 0 do not depend
  on the call's completion.
- ``mean``: (G − 1)/G times the unbiased gradient, since R_g − mean(R) = (G − 1)/G · (R_g − mean of
  the others).
- ``max``: biased. The maximum depends on the call's own return.
- ``advantage_normalization``: biased. The standard deviation depends on the call's own return.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from comlrl.types import Episode, Node, Tree


def joint_returns(tree: Tree, discount: float, agent: int | None = None) -> list[list[float]]:
    """Compute R_k for each node, in tree order, and each of its joint actions; shape (nodes, K).

    ``agent``: whose rewards count; None: the team's.
    """
    rewards = [n.rewards_K if agent is None else n.rewards_of(agent) for n in tree.nodes]
    returns = [
        list(reward_K) or [0.0] * len(node.joint_actions_K)
        for reward_K, node in zip(rewards, tree.nodes, strict=True)
    ]
    starts = tree.turn_starts()
    candidates: Counter[int] = Counter()  # joint actions of a turn that ``handoff`` may continue
    for start, node in zip(starts, tree.nodes, strict=True):
        candidates[start] += 0 if node.terminated else len(node.scores_K)
    future: dict[tuple[int, int], float] = {}  # by (node, joint action)
    handed_on: defaultdict[int, list[float]] = defaultdict(list)  # all futures of a turn
    for index in range(len(tree.nodes) - 1, -1, -1):  # children come after their parents
        node, of_turn = tree.nodes[index], handed_on[starts[index]]
        future_of = {
            k: future[index, k] for k in range(len(returns[index])) if (index, k) in future
        }
        if of_turn and node.scores_K and not node.terminated and tree.handoff is not None:
            future_of = _handed_on(
                future_of, of_turn, len(returns[index]), candidates[starts[index]]
            )
        for k, value in future_of.items():
            returns[index][k] += value
        value = mean(returns[index])
        if node.first_agent == 0:  # the parent belongs to the previous turn
            value *= discount
            if node.parent >= 0:
                handed_on[starts[node.parent]].append(value)
        future[node.parent, node.parent_action] = value
    return returns


def joint_returns_of_agents(tree: Tree, discount: float) -> list[list[list[float]]]:
    """Compute ``joint_returns`` of each agent; one list for all agents if they share rewards."""
    agents = range(tree.num_agents)
    if any(node.own_rewards_KN for node in tree.nodes):
        return [joint_returns(tree, discount, agent) for agent in agents]
    shared = joint_returns(tree, discount)
    return [shared for _ in agents]


def _handed_on(
    future_of: Mapping[int, float], of_turn: list[float], count: int, candidates: int
) -> dict[int, float]:
    """Return the future's term in the return of each of a node's ``count`` joint actions.
    ``future_of``: futures of those that have a child. ``of_turn``: all futures of the turn, which
    has ``candidates`` joint actions."""
    average = mean(of_turn)
    factor = (candidates - 1) / max(1, len(of_turn) - 1)  # m = 1: the one future is the average
    return {k: average + factor * (future_of.get(k, average) - average) for k in range(count)}


def completion_returns(
    node: Node, agent: int, joint_returns_K: list[float], leniency: float = 0.0
) -> list[float]:
    """Compute the return of each completion of one agent that acts at the node; shape (G,).

        R_g = (1 − leniency) · mean_g + leniency · best_g

    mean_g is over the joint actions that contain the completion, and best_g is the maximum over
    those that contain it or a sibling with the same tokens. With leniency 1 an agent does not avoid
    completions that only some of its partners' actions spoil (Lauer & Riedmiller, 2000). Leniency
    that decays to 0 lets a team choose among equally good conventions (Panait, Sullivan & Luke,
    2006). The maximum overestimates if the reward or the partners' later turns are random.

    With ``joint_mode: counterfactual``, only joint actions that compare the agent's completions
    with the same partners' completions count.
    """
    place = agent - node.first_agent
    size = len(node.agents_N[place].completions_G)
    returns_G: list[list[float]] = [[] for _ in range(size)]
    compared = counterfactuals(node, agent)
    counted = set().union(*compared) if compared else range(len(joint_returns_K))
    for k, (action, value) in enumerate(zip(node.joint_actions_K, joint_returns_K, strict=True)):
        if k in counted:
            returns_G[action[place]].append(value)
    mean_G = [mean(returns) for returns in returns_G]
    if not leniency:
        return mean_G
    tokens_G = [completion.token_ids for completion in node.agents_N[place].completions_G]
    best: dict[tuple[int, ...], float] = {}
    for tokens, returns in zip(tokens_G, returns_G, strict=True):
        best[tokens] = max([best.get(tokens, -math.inf), *returns])
    return [
        (1 - leniency) * average + leniency * best[tokens]
        for average, tokens in zip(mean_G, tokens_G, strict=True)
    ]


def counterfactuals(node: Node, agent: int) -> list[list[int]]:
    """Group joint actions that differ only in one agent's completion; return the groups that
    contain all of its completions.

    In mode ``cross`` these groups contain all joint actions; in ``counterfactual`` those whose
    other agents have the same generation index; in ``align`` there are none.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    place = agent - node.first_agent
    for k, action in enumerate(node.joint_actions_K):
        groups.setdefault((*action[:place], *action[place + 1 :]), []).append(k)
    generations = len(node.agents_N[place].completions_G)
    return [group for group in groups.values() if len(group) == generations]


def return_to_go(episode: Episode, agent: int, call: int, discount: float) -> float:
    """Compute R_ij for the j-th call (1-based); ``call`` may exceed the agent's number of calls."""
    *midway, final = episode.paid_N[agent]
    following = [paid for paid in midway if paid.calls >= call]
    total = sum(discount ** (paid.calls - call) * paid.value for paid in following)
    return total + discount ** max(0, final.calls - call) * final.value


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
