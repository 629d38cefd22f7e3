"""Tree → the return of each joint action → the return of each agent's completion.

    R_k(t) = r_k + γ · mean over the joint returns of the child that k led to (0 where it has none)

Where each agent has its own reward (``Score.by_agent``), r_k and R_k are the agent's.

In a sequential turn r_k is 0 until the last agent has acted, and γ counts between turns alone: an
agent's return is the mean of what follows it within the turn.

With ``handoff``, m of a turn's K joint actions have children (m is ``handoff_width``). F_k is the
mean return of k's child, and F̄ the mean of the m futures:

    R_k = r_k + γ F̄ + γ (K − 1)/(m − 1) · (F_k − F̄)    where k has a child
    R_k = r_k + γ F̄                                     where it has none

If the m are drawn at random, the expected R_k is the full tree's, and so are the expected
advantages ``mean`` and ``rloo``, which are linear in it. The factor is needed because k has a
child in m of K draws only, and because F̄ then holds F_k itself. ``best`` is biased. With m = 1
all are credited with one future, which cancels in the sibling baseline: γ then has no effect, and
a turn learns from its own reward alone. With m = K it is the full tree. (A departure from MAGRPO's
paper.)

A program's agent i has, from its j-th call on, where it was paid r_m after m calls,

    R_ij = Σ_{m ≥ j} γ^(m − j) r_m + γ^max(0, n − j) r_final,   n = its calls in the episode

γ counts the agent's own calls. The baseline of a j-th call is taken of the same sums in all G
episodes of the task, also in those where the agent has made fewer calls: there only the final
reward follows. Its effect on the expected gradient E[Â_ij ∇ log π] depends on its kind:

- ``rloo``, ``greedy``, ``raw``: unbiased. The other episodes, the greedy one and 0 do not depend
  on what the call chooses.
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
    """Compute R_k for each node of the tree (its order) and each joint action, shape (nodes, K).

    ``agent``: whose rewards count; None: the team's.
    """
    rewards = [n.rewards_K if agent is None else n.rewards_of(agent) for n in tree.nodes]
    returns = [
        list(reward_K) or [0.0] * len(node.joint_actions_K)
        for reward_K, node in zip(rewards, tree.nodes, strict=True)
    ]
    starts = tree.turn_starts()
    candidates: Counter[int] = Counter()  # joint actions of a turn that may be handed on
    for start, node in zip(starts, tree.nodes, strict=True):
        candidates[start] += 0 if node.terminated else len(node.scores_K)
    future: dict[tuple[int, int], float] = {}  # of a node's joint action
    handed_on: defaultdict[int, list[float]] = defaultdict(list)  # futures of a whole turn
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
        if node.first_agent == 0:  # a turn lies between it and its parent
            value *= discount
            if node.parent >= 0:
                handed_on[starts[node.parent]].append(value)
        future[node.parent, node.parent_action] = value
    return returns


def joint_returns_of_agents(tree: Tree, discount: float) -> list[list[list[float]]]:
    """Compute ``joint_returns`` of each agent; the same list for all where they share their
    rewards."""
    agents = range(tree.num_agents)
    if any(node.own_rewards_KN for node in tree.nodes):
        return [joint_returns(tree, discount, agent) for agent in agents]
    shared = joint_returns(tree, discount)
    return [shared for _ in agents]


def _handed_on(
    future_of: Mapping[int, float], of_turn: list[float], count: int, candidates: int
) -> dict[int, float]:
    """Return the term added to each of a node's ``count`` joint actions: of those with a child
    (``future_of``) and of those without. ``of_turn``: the futures of all ``candidates`` that were
    handed on."""
    average = mean(of_turn)
    factor = (candidates - 1) / max(1, len(of_turn) - 1)  # m = 1: the one future is the average
    return {k: average + factor * (future_of.get(k, average) - average) for k in range(count)}


def completion_returns(
    node: Node, agent: int, joint_returns_K: list[float], leniency: float = 0.0
) -> list[float]:
    """Compute the return of each completion of one agent that acts here; shape (G,).

        R_g = (1 − leniency) · mean_g + leniency · best_g

    mean_g is over the joint actions that contain the completion, best_g the maximum over those that
    contain it or a sibling of the same tokens. With leniency 1 an agent does not avoid what only
    some of its partners' actions spoil (Lauer & Riedmiller, 2000); leniency that falls to 0 lets a
    team choose among conventions that are equally good (Panait, Sullivan & Luke, 2006). Where the
    reward or the partners' later turns are random, the maximum overestimates.

    Where only some of the agent's joint actions compare its completions with the same partners
    (``joint_mode: counterfactual``), those alone count.
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
    """Group joint actions that differ in one agent's completion alone, in groups that have all of
    its completions.

    cross: all joint actions are in such groups. counterfactual: those whose other agents have one
    index. align: there are none.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    place = agent - node.first_agent
    for k, action in enumerate(node.joint_actions_K):
        groups.setdefault((*action[:place], *action[place + 1 :]), []).append(k)
    generations = len(node.agents_N[place].completions_G)
    return [group for group in groups.values() if len(group) == generations]


def return_to_go(episode: Episode, agent: int, call: int, discount: float) -> float:
    """Compute R_ij for the j-th call, from 1; ``call`` may exceed the calls that the agent has
    made."""
    *midway, final = episode.paid_N[agent]
    following = [paid for paid in midway if paid.calls >= call]
    total = sum(discount ** (paid.calls - call) * paid.value for paid in following)
    return total + discount ** max(0, final.calls - call) * final.value


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
