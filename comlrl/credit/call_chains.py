"""Episodes of programs, numbered: the form in which PPO credits the calls of a step.

An agent's calls in an episode are one chain, in the order in which they were made. A
reward comes with the last call that the agent had made by then; one that is paid before its first
call follows from none of its choices and counts for none. A state is a task, with all of its
episodes: they are never divided among minibatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from comlrl.credit.chains import Group, T, View, number_of, origin_of
from comlrl.credit.episodes import call_rows
from comlrl.types import Call, EpisodeGroup, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChains:
    """A step's calls, numbered through all of its episodes: call k of agent i is k · N + i."""

    num_agents: int
    calls: tuple[Call, ...]
    episodes: tuple[tuple[int, ...], ...]  # the calls of each, in the order they were made
    tasks_B: tuple[tuple[int, ...], ...]  # the episodes of each task
    reward_K: tuple[float, ...]  # what each call's agent was paid between it and its next call

    @property
    def states_B(self) -> tuple[int, ...]:
        """Each task is one state."""
        return (1,) * len(self.tasks_B)

    @property
    def prompts(self) -> list[tuple[int, Call]]:
        """What each call read, with its agent."""
        return [(call.agent, call) for call in self.calls]

    def number(self, call: int) -> int:
        return number_of(call, self.calls[call].agent, self.num_agents)

    def origin(self, number: T) -> tuple[T, T]:
        """Call and agent of a number, or of each of a tensor of them."""
        return origin_of(number, self.num_agents)

    def reward(self, number: int) -> float:
        """What a call's agent was paid with it, processed."""
        return self.reward_K[self.origin(number)[0]]

    def numbered(self, agents: Sequence[int]) -> list[list[int]]:
        """Chains of these agents' calls, by their numbers; none where an agent has no call."""
        chains = [
            [self.number(k) for k in episode if self.calls[k].agent == agent]
            for agent in agents
            for episode in self.episodes
        ]
        return [chain for chain in chains if chain]

    def views(self, groups: Sequence[Group]) -> list[list[View]]:
        """For each task, a view of each call: the latest prompt of each agent that its group
        reads, as far as they were asked by then, its own last. No prompt that was asked later is
        read: it may hold what the call is about to write, and the advantage would no longer tell
        what that is worth."""
        group_of = {agent: group for group in groups for agent in group.credited}
        return [
            [
                View((self.number(k),), self._read(episode[: at + 1], group_of[agent]))
                for e in episodes
                for episode in [self.episodes[e]]
                for at, k in enumerate(episode)
                for agent in [self.calls[k].agent]
                if agent in group_of
            ]
            for episodes in self.tasks_B
        ]

    def _read(self, asked: Sequence[int], group: Group) -> tuple[int, ...]:
        latest = {self.calls[k].agent: k for k in asked}
        return tuple(sorted(k for agent, k in latest.items() if agent in group.read))

    def rows(self, agents: Sequence[int], weight_T: Sequence[float]) -> list[list[Row]]:
        """For each task, rows of each of these agents' calls, weighted by ``weight_T``'s one."""
        (weight,) = weight_T
        return [
            [row for agent in agents for row in call_rows(self._weighted(episodes, agent, weight))]
            for episodes in self.tasks_B
        ]

    def _weighted(
        self, episodes: Sequence[int], agent: int, weight: float
    ) -> list[tuple[Call, float, int]]:
        own = [k for e in episodes for k in self.episodes[e] if self.calls[k].agent == agent]
        return [(self.calls[k], weight, self.number(k)) for k in own]


def call_chains_of(groups: Sequence[EpisodeGroup]) -> CallChains:
    """Number the calls of a step's episodes."""
    calls: list[Call] = []
    rewards: list[float] = []
    episodes: list[tuple[int, ...]] = []
    tasks: list[tuple[int, ...]] = []
    for group in groups:
        first = len(episodes)
        for episode in group.episodes_G:
            paid: defaultdict[tuple[int, int], float] = defaultdict(float)
            for agent, own in enumerate(episode.paid_N):
                for made, value in own:
                    paid[agent, made - 1] += value
            episodes.append(tuple(range(len(calls), len(calls) + len(episode.calls))))
            calls += episode.calls
            made_N = [0] * group.num_agents
            for call in episode.calls:
                rewards.append(paid[call.agent, made_N[call.agent]])
                made_N[call.agent] += 1
        tasks.append(tuple(range(first, len(episodes))))
    agents = groups[0].num_agents if groups else 1
    return CallChains(
        num_agents=agents,
        calls=tuple(calls),
        episodes=tuple(episodes),
        tasks_B=tuple(tasks),
        reward_K=tuple(rewards),
    )
