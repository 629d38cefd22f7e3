"""Bundles of chains, numbered: the form in which PPO and SHPPO credit a step.

A step's joint actions are numbered c = 0 … C − 1. Rollouts are chains (G at turn 1, one
afterwards), so joint action c is the c-th completion of every agent, and each chain runs from a
task's first turn to its last and never into another task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comlrl.types import Node, Row, Tree


@dataclass(frozen=True, slots=True)
class Chains:
    """A step's states and joint actions, numbered through all of its trees."""

    nodes_S: tuple[Node, ...]
    parent_S: tuple[int, ...]  # the state one turn before, or −1
    actions_S: tuple[tuple[int, ...], ...]  # numbers of each state's joint actions
    state_C: tuple[int, ...]
    reward_C: tuple[float, ...]  # processed, of the team
    own_reward_CN: tuple[tuple[float, ...], ...]  # what each agent learns from; alike where shared
    chains: tuple[tuple[int, ...], ...]  # joint actions turn by turn

    def reward(self, number: int, team: int) -> float:
        """The processed reward of a completion by its number (``rows``): its agent's own, or the
        team's."""
        return self.own_reward_CN[number // team][number % team]

    @property
    def states_B(self) -> list[int]:
        """How many states each tree has."""
        starts = [s for s, parent in enumerate(self.parent_S) if parent < 0]
        ends = [*starts[1:], len(self.parent_S)]
        return [end - start for start, end in zip(starts, ends, strict=False)]

    def numbered(self, agents: Sequence[int], team: int) -> list[list[int]]:
        """Chains of these agents' completions, by their numbers (``rows``)."""
        return [[c * team + i for c in chain] for i in agents for chain in self.chains]

    def rows(self, agents: Sequence[int], weight_T: Sequence[float], team: int) -> list[list[Row]]:
        """For each state a row of each of these agents: its completions, weighted by the turn's
        ``weight_T``. Agent i's of joint action c has the number c · ``team`` + i."""
        rows_S = []
        for node, actions in zip(self.nodes_S, self.actions_S, strict=True):
            rows = []
            for agent in agents:
                turn = node.agents_N[agent]
                weights = (weight_T[node.turn - 1],) * len(turn.completions_G)
                numbers = (c * team + agent for c in actions)
                rows.append(Row.of(turn.prompt_ids, turn.completions_G, weights, numbers))
            rows_S.append(rows)
        return rows_S


def chains_of(trees: Sequence[Tree]) -> Chains:
    """Number the states and joint actions of trees that are bundles of chains."""
    nodes: list[Node] = []
    parents: list[int] = []
    actions: list[tuple[int, ...]] = []
    chains: list[list[int]] = []
    count = 0
    for tree in trees:
        offset = len(nodes)
        of_action: dict[int, list[int]] = {}  # number of a joint action → its chain
        for node in tree.nodes:  # breadth-first: a parent stands before its children
            parent = offset + node.parent if node.parent >= 0 else -1
            numbers = tuple(range(count, count + len(node.rewards_K)))
            count += len(numbers)
            if parent < 0:
                started: list[list[int]] = [[number] for number in numbers]
                chains += started
                of_action.update(zip(numbers, started, strict=True))
            else:
                (number,) = numbers  # one sample at later turns
                chain = of_action[actions[parent][node.parent_action]]
                chain.append(number)
                of_action[number] = chain
            nodes.append(node)
            parents.append(parent)
            actions.append(numbers)
    state = tuple(s for s, numbers in enumerate(actions) for _ in numbers)
    rewards = tuple(reward for node in nodes for reward in node.rewards_K)
    own = tuple(
        of_action
        for node in nodes
        for of_action in zip(*(node.rewards_of(i) for i in node.acting), strict=True)
    )
    return Chains(
        tuple(nodes), tuple(parents), tuple(actions), state, rewards, own,
        tuple(tuple(chain) for chain in chains),
    )  # fmt: skip
