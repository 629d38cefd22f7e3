"""States and joint actions of trees that are bundles of chains, written out: what decisions are
checked against.

Joint action c is the c-th completion of every agent, and each chain runs from a task's first turn
to its last. A sequential turn has a state for each of its joint actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from comlrl.types import AgentTurn, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """A step's states and joint actions, numbered through all of its trees."""

    turns_SN: tuple[tuple[AgentTurn, ...], ...]  # what each agent read and wrote there
    turn_S: tuple[int, ...]  # 1-based
    parent_S: tuple[int, ...]  # the state one turn before, or −1
    actions_S: tuple[tuple[int, ...], ...]  # numbers of each state's joint actions
    state_C: tuple[int, ...]
    reward_C: tuple[float, ...]  # processed, of the team
    own_reward_CN: tuple[tuple[float, ...], ...]  # what each agent learns from; alike where shared
    chains: tuple[tuple[int, ...], ...]  # joint actions turn by turn
    states_B: tuple[int, ...]  # how many states each tree has

    @property
    def num_agents(self) -> int:
        """Of the team; 1 where a process has no part of the step."""
        return len(self.turns_SN[0]) if self.turns_SN else 1

    def number(self, action: int, agent: int) -> int:
        """Of an agent's completion of a joint action: c · N + i."""
        return action * self.num_agents + agent

    def origin(self, number: int) -> tuple[int, int]:
        """Joint action and agent of a completion's number."""
        return divmod(number, self.num_agents)

    def reward(self, number: int) -> float:
        """The processed reward of a completion by its number: its agent's own, or the team's."""
        action, agent = self.origin(number)
        return self.own_reward_CN[action][agent]

    def numbered(self, agents: Sequence[int]) -> list[list[int]]:
        """Chains of these agents' completions, by their numbers."""
        return [[self.number(c, i) for c in chain] for i in agents for chain in self.chains]


def chains_of(trees: Sequence[Tree]) -> Chains:
    """Number the states and joint actions of trees that are bundles of chains."""
    turns: list[tuple[AgentTurn, ...]] = []
    turn_numbers: list[int] = []
    parents: list[int] = []
    actions: list[tuple[int, ...]] = []
    chains: list[list[int]] = []
    rewards: list[float] = []
    own_rewards: list[tuple[float, ...]] = []
    states_B: list[int] = []
    for tree in trees:
        first, starts = len(turns), tree.turn_starts()
        state: dict[int, int] = {}  # of a scored node
        of_action: dict[int, list[int]] = {}  # number of a joint action → its chain
        for index, node in enumerate(tree.nodes):  # breadth-first: parents come first
            if not node.scores_K:
                continue
            numbers = tuple(range(len(rewards), len(rewards) + len(node.rewards_K)))
            start = tree.nodes[starts[index]]
            parent = state[start.parent] if start.parent >= 0 else -1
            if parent < 0:
                of_action |= {number: [] for number in numbers}
                chains += (of_action[number] for number in numbers)
            else:
                (number,) = numbers  # one sample at later turns
                of_action[number] = of_action[actions[parent][start.parent_action]]
            for number in numbers:
                of_action[number].append(number)
            state[index] = len(turns)
            turns.append(_turns(tree, index))
            turn_numbers.append(node.turn)
            parents.append(parent)
            actions.append(numbers)
            rewards += node.rewards_K
            of_agents = [node.rewards_of(agent) for agent in range(tree.num_agents)]
            own_rewards += zip(*of_agents, strict=True)
        states_B.append(len(turns) - first)
    state_C = tuple(s for s, numbers in enumerate(actions) for _ in numbers)
    return Chains(
        turns_SN=tuple(turns),
        turn_S=tuple(turn_numbers),
        parent_S=tuple(parents),
        actions_S=tuple(actions),
        state_C=state_C,
        reward_C=tuple(rewards),
        own_reward_CN=tuple(own_rewards),
        chains=tuple(tuple(chain) for chain in chains),
        states_B=tuple(states_B),
    )


def _turns(tree: Tree, index: int) -> tuple[AgentTurn, ...]:
    """What each agent read and wrote for the joint actions of a scored node."""
    node = tree.nodes[index]
    if node.first_agent == 0:
        return node.agents_N
    assert len(node.scores_K) == 1, "a later agent of a sequential turn answers once"
    return tuple(
        replace(turn, completions_G=(completion,)) for turn, completion in tree.team(index, 0)
    )
