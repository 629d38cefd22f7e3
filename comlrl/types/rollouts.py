"""Results of a rollout: trees of turns, and episodes of programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from comlrl.types.sampling import Completion, Message


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: an id, and the fields of its data row, which only its domain interprets."""

    task_id: str
    fields: Mapping[str, Any] = field(default_factory=dict)


JointMode = Literal["align", "cross", "counterfactual"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a rollout: agents, turns and generations, their pairing and continuation."""

    num_agents: int
    num_turns: int
    num_generations: int
    _: KW_ONLY
    joint_mode: JointMode = "align"
    handoff: Literal["random", "best"] | None = None
    early_termination_threshold: float | None = None
    later_generations: int | None = None  # from turn 2; None: num_generations (chains: 1)
    handoff_width: int = 1  # how many joint actions of a turn ``handoff`` continues
    turn_order: Literal["simultaneous", "sequential"] = "simultaneous"
    num_generations_sequential: int = 2  # for every agent after the first in a sequential turn

    @property
    def stages(self) -> tuple[range, ...]:
        """Agents of each stage of a turn: they act simultaneously and see earlier stages' texts."""
        if self.turn_order == "simultaneous":
            return (range(self.num_agents),)
        return tuple(range(agent, agent + 1) for agent in range(self.num_agents))

    @property
    def chain(self) -> Shape:
        """The shape with one joint action per turn."""
        return replace(
            self, num_generations=1, later_generations=None, joint_mode="align", handoff=None,
            num_generations_sequential=1,
        )  # fmt: skip

    def generations(self, agent: int, turn: int = 1) -> int:
        """Return how many completions this agent samples at a node of this turn."""
        if agent > 0 and self.turn_order == "sequential":
            return self.num_generations_sequential
        return self.num_generations if turn == 1 else self.later_generations or self.num_generations

    def joint_actions(self, agents: int, generations: int) -> int:
        """Return K, the number of joint actions of a node with so many agents and generations."""
        if self.joint_mode == "align" or agents == 1:
            return generations
        if self.joint_mode == "cross" or agents == 2:
            return generations**agents
        return generations + agents * generations * (generations - 1)

    @property
    def turn_joint_actions(self) -> int:
        """Number of joint actions in the first turn from one state, after all its stages."""
        return math.prod(
            self.joint_actions(len(stage), self.generations(stage.start)) for stage in self.stages
        )


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """The prompt and completions of one agent at one node."""

    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completions_G: tuple[Completion, ...]
    turns_dropped: int = 0  # number of oldest turns left out to fit the prompt into max_length


@dataclass(frozen=True, slots=True)
class JointAction:
    """One completion from each agent for one task, in the agents' order."""

    task: Task
    completions_N: tuple[str, ...]
    turn: int = 1  # 1-based
    # joint actions of the earlier turns on this branch, oldest first
    history: tuple[JointAction, ...] = field(default=(), repr=False)

    @property
    def as_past(self) -> tuple[JointAction, ...]:
        """The history of a joint action that follows this one."""
        return (*self.history, self)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a joint action, and how it came about."""

    value: float  # the team's; with ``by_agent``, the mean of the agents' task rewards
    parts: Mapping[str, float] = field(default_factory=dict)  # by name; they sum to ``task_value``
    passed: bool | None = None  # None: the reward does not define passing
    facts: Any = None  # the reward's analysis, read only by its domain and the external modes
    _: KW_ONLY
    task_reward: float | None = None  # the task's own reward, if ``value`` is a reward model's
    # task reward of each agent; None: all share ``value``
    by_agent: tuple[float, ...] | None = None

    @property
    def task_value(self) -> float:
        """The task's reward, even if a reward model's is trained on."""
        return self.value if self.task_reward is None else self.task_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One state in a task's tree, with everything that was sampled there.

    In a simultaneous turn all agents act at one node. In a sequential turn each acts at a separate
    node, below the completions in its prompt; only the last agent's joint actions are scored.
    """

    turn: int  # 1-based
    parent: int  # index into Tree.nodes; -1 for the root
    parent_action: int  # which joint action of the parent led here; -1 for the root
    agents_N: tuple[AgentTurn, ...]  # of the agents that act here
    joint_actions_K: tuple[tuple[int, ...], ...]  # generation index of each agent that acts here
    scores_K: tuple[Score, ...]  # raw; empty if other agents have still to act in this turn
    rewards_K: tuple[float, ...]  # after reward_processor; empty if scores_K is
    terminated: bool = False  # the mean reward exceeded early_termination_threshold
    first_agent: int = 0  # index of the first agent that acts here
    # rewards of all agents of the team, after reward_processor; empty: they share ``rewards_K``
    own_rewards_KN: tuple[tuple[float, ...], ...] = ()

    def rewards_of(self, agent: int) -> tuple[float, ...]:
        """Return an agent's reward for each joint action: the agent's own, or else the team's."""
        return tuple(reward_N[agent] for reward_N in self.own_rewards_KN) or self.rewards_K

    @property
    def acting(self) -> range:
        """The agents that act here."""
        return range(self.first_agent, self.first_agent + len(self.agents_N))

    @property
    def tokens(self) -> int:
        """Number of tokens sampled here."""
        return sum(len(c.token_ids) for turn in self.agents_N for c in turn.completions_G)


@dataclass(frozen=True, slots=True)
class Tree:
    """A task's scored rollout, read-only: nodes in breadth-first order, the root first."""

    task: Task
    nodes: tuple[Node, ...]
    joint_mode: JointMode
    handoff: Literal["random", "best"] | None
    # each agent's return of a greedy rollout from each node; empty: there were no such rollouts
    greedy_SN: tuple[tuple[float, ...], ...] = ()
    greedy_cost: tuple[int, int] = (0, 0)  # scored joint actions and tokens of greedy rollouts

    @property
    def num_agents(self) -> int:
        """Number of agents in the team, even if they act at separate nodes."""
        return max(node.acting.stop for node in self.nodes)

    @property
    def scored(self) -> int:
        """Number of scored joint actions, including those of greedy rollouts."""
        return sum(len(node.scores_K) for node in self.nodes) + self.greedy_cost[0]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens, including those of greedy rollouts."""
        return sum(node.tokens for node in self.nodes) + self.greedy_cost[1]

    @property
    def final_score(self) -> Score:
        """The score of a chain's last turn."""
        return self.nodes[-1].scores_K[0]

    def answered(self) -> Iterator[tuple[int, int, AgentTurn]]:
        """Yield the turn, the agent, and its prompt and completions, for each node."""
        for node in self.nodes:
            yield from (
                (node.turn, *agent_turn)
                for agent_turn in zip(node.acting, node.agents_N, strict=True)
            )

    def scored_actions(self) -> list[JointAction]:
        """Return the joint actions that the reward scored."""
        return [
            self.joint_action(index, action)
            for index, node in enumerate(self.nodes)
            for action in range(len(node.scores_K))
        ]

    def children(self, index: int) -> dict[int, int]:
        """Return a mapping from joint actions to the indices of their child nodes."""
        return {n.parent_action: i for i, n in enumerate(self.nodes) if n.parent == index}

    def turn_starts(self) -> list[int]:
        """Return, for each node, the node where its turn began.

        It is the node itself if all agents act simultaneously.
        """
        starts: list[int] = []
        for index, node in enumerate(self.nodes):
            starts.append(index if node.first_agent == 0 else starts[node.parent])
        return starts

    def path(self, index: int, action: int) -> tuple[tuple[int, int, int], ...]:
        """Return (node, agent, generation) of each completion in a joint action, by agent."""
        node = self.nodes[index]
        acting = zip(node.acting, node.joint_actions_K[action], strict=True)
        here = tuple((index, agent, g) for agent, g in acting)
        if node.first_agent == 0:
            return here
        return (*self.path(node.parent, node.parent_action), *here)

    def team(self, index: int, action: int) -> tuple[tuple[AgentTurn, Completion], ...]:
        """Return each agent's turn and completion in a scored joint action, in order."""
        team = []
        for at, agent, g in self.path(index, action):
            turn = self.nodes[at].agents_N[agent - self.nodes[at].first_agent]
            team.append((turn, turn.completions_G[g]))
        return tuple(team)

    def without_support(self) -> Tree:
        """Return the tree without ``Completion.support``."""
        nodes = tuple(
            replace(n, agents_N=tuple(map(_without_support, n.agents_N))) for n in self.nodes
        )
        return replace(self, nodes=nodes)

    def joint_action(self, index: int, action: int) -> JointAction:
        """Return a scored joint action as texts, with its history."""
        completions_N = tuple(c.text for _, c in self.team(index, action))
        node = start = self.nodes[index]
        while start.first_agent > 0:
            start = self.nodes[start.parent]
        history: tuple[JointAction, ...] = ()
        if start.parent >= 0:
            history = self.joint_action(start.parent, start.parent_action).as_past
        return JointAction(self.task, completions_N, node.turn, history)


def _without_support(turn: AgentTurn) -> AgentTurn:
    return replace(turn, completions_G=tuple(replace(c, support=None) for c in turn.completions_G))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One completion that a program requested from an agent."""

    agent: int
    number: int  # index among the agent's calls in the episode
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion

    @property
    def as_turn(self) -> AgentTurn:
        return AgentTurn(self.prompt, self.prompt_ids, (self.completion,))

    def without_support(self) -> Call:
        return replace(self, completion=replace(self.completion, support=None))


class AgentReward(NamedTuple):
    """A reward that an agent received during an episode, after reward_processor."""

    calls: int  # how many the agent had made by then
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of a program for one task, read-only."""

    calls: tuple[Call, ...]  # in the order they were made
    score: Score  # raw
    reward: float  # ``score.value`` after reward_processor
    paid_N: tuple[tuple[AgentReward, ...], ...]  # of each agent; the last is for the final score
    joint_action: JointAction | None = None  # that the run's reward scored; None: it scored none
    error: str | None = None  # why the program failed, if ``program.on_error`` is zero

    def calls_of(self, agent: int) -> tuple[Call, ...]:
        """Return the calls of one agent, in order."""
        return tuple(call for call in self.calls if call.agent == agent)


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """A task's episodes, run concurrently: the counterpart of a tree for programs."""

    task: Task
    names_N: tuple[str, ...]  # of the agents
    episodes_G: tuple[Episode, ...]
    greedy: Episode | None = None  # sampled greedily, if it is the baseline of the returns

    @property
    def num_agents(self) -> int:
        return len(self.names_N)

    @property
    def scored(self) -> int:
        """Number of episodes, including the greedy one; each counts as a scored joint action."""
        return len(self._all)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens, including those of the greedy episode."""
        return sum(len(c.completion.token_ids) for e in self._all for c in e.calls)

    @property
    def _all(self) -> tuple[Episode, ...]:
        return self.episodes_G if self.greedy is None else (*self.episodes_G, self.greedy)

    @property
    def final_score(self) -> Score:
        """The score of a single episode."""
        return self.episodes_G[-1].score

    def answered(self) -> Iterator[tuple[int, int, AgentTurn]]:
        """Yield (1, agent, prompt and completion) for each call; an episode is one turn."""
        return ((1, call.agent, call.as_turn) for e in self.episodes_G for call in e.calls)

    def scored_actions(self) -> list[JointAction]:
        """Return the joint actions that the reward scored."""
        return [e.joint_action for e in self.episodes_G if e.joint_action is not None]

    def without_support(self) -> EpisodeGroup:
        """Return the group without ``Completion.support``, to send to other processes."""
        return replace(
            self,
            greedy=None,
            episodes_G=tuple(
                replace(e, calls=tuple(call.without_support() for call in e.calls))
                for e in self.episodes_G
            ),
        )


RolloutResult = Tree | EpisodeGroup  # for one task


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One completion that an agent chose: in a turn of a tree, or as a call of a program.

    ``state``, ``unit`` and ``node`` number groups of decisions, as defined in
    ``comlrl/credit/decisions.py``. A node groups decisions of one agent.
    """

    agent: int
    turn: int = 1  # 1-based
    state: int = 0
    unit: int = 0
    node: int = 0
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    before: int  # number of the agent's previous decision; −1 if there is none
    # numbers of decisions that have the latest prompts of all agents asked so far
    read: tuple[int, ...]
    reward: float  # of its first joint action; in programs, received until the agent's next call
    returns_G: tuple[float, ...]  # of all siblings, including itself
    place: int  # index of its return in ``returns_G``
    greedy_return: float | None = None  # of a greedy rollout from the same point, if there is one


@dataclass(frozen=True, slots=True)
class Attempt:
    """A scored joint action that the agents are to revise."""

    task: Task
    completions_N: tuple[str, ...]
    score: Score
    turn: int  # the turn that produced it, 1-based
