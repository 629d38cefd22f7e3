"""Results of a rollout: trees of turns, and the episodes of programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from comlrl.types.sampling import Completion, Message


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: its name, and the fields of its row, which its domain alone reads."""

    task_id: str
    fields: Mapping[str, Any] = field(default_factory=dict)


JointMode = Literal["align", "cross", "counterfactual"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a rollout is sampled: agents, turns, generations, how they are paired and continued."""

    num_agents: int
    num_turns: int
    num_generations: int
    _: KW_ONLY
    joint_mode: JointMode = "align"
    handoff: Literal["random", "best"] | None = None
    early_termination_threshold: float | None = None
    later_generations: int | None = None  # at turns 2+; null: num_generations (chains: 1)
    handoff_width: int = 1  # joint actions of a turn that ``handoff`` continues
    turn_order: Literal["simultaneous", "sequential"] = "simultaneous"
    num_generations_sequential: int = 2  # of every agent but the first of a sequential turn

    @property
    def stages(self) -> tuple[range, ...]:
        """A turn's stages: a stage's agents act simultaneously and see what earlier ones wrote."""
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
        """Return this agent's number of completions at a node of this turn."""
        if agent > 0 and self.turn_order == "sequential":
            return self.num_generations_sequential
        return self.num_generations if turn == 1 else self.later_generations or self.num_generations

    def joint_actions(self, agents: int, generations: int) -> int:
        """Return K, the number of joint actions of a node with these agents and generations."""
        if self.joint_mode == "align" or agents == 1:
            return generations
        if self.joint_mode == "cross" or agents == 2:
            return generations**agents
        return generations + agents * generations * (generations - 1)

    @property
    def turn_joint_actions(self) -> int:
        """Joint actions of a first turn from one state, after all its stages."""
        return math.prod(
            self.joint_actions(len(stage), self.generations(stage.start)) for stage in self.stages
        )


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """The prompt and completions of one agent at one node."""

    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completions_G: tuple[Completion, ...]
    turns_dropped: int = 0  # oldest turns left out so that the prompt fits max_length


@dataclass(frozen=True, slots=True)
class JointAction:
    """One completion from each agent for one task, in the agents' order."""

    task: Task
    completions_N: tuple[str, ...]
    turn: int = 1  # 1-based
    # the joint actions of the turns before it on its branch, oldest first
    history: tuple[JointAction, ...] = field(default=(), repr=False)

    @property
    def as_past(self) -> tuple[JointAction, ...]:
        """The history of the joint actions that follow it."""
        return (*self.history, self)


@dataclass(frozen=True, slots=True)
class Score:
    """The value of a joint action, and its reasons."""

    value: float  # of the team; with ``by_agent``, the mean of its task rewards
    parts: Mapping[str, float] = field(default_factory=dict)  # by name; they sum to ``task_value``
    passed: bool | None = None  # None: this reward has no notion of passing
    facts: Any = None  # the reward's analysis, for its domain and the external modes alone
    _: KW_ONLY
    task_reward: float | None = None  # the task's own reward, where ``value`` is a reward model's
    # each agent's own task reward, in their order; None: all share ``value``
    by_agent: tuple[float, ...] | None = None

    @property
    def task_value(self) -> float:
        """The task's reward, whatever was trained on."""
        return self.value if self.task_reward is None else self.task_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One state of one task's tree, with all that was sampled there.

    In a simultaneous turn all agents act at one node. In a sequential turn each acts at its
    own node, below the completions that it has read; only the last agent's joint actions are
    scored.
    """

    turn: int  # 1-based
    parent: int  # index into Tree.nodes; -1 for the root
    parent_action: int  # which joint action of the parent led here; -1 for the root
    agents_N: tuple[AgentTurn, ...]  # of those that act here
    joint_actions_K: tuple[tuple[int, ...], ...]  # generation index of each that acts here
    scores_K: tuple[Score, ...]  # raw; empty where agents have still to act in this turn
    rewards_K: tuple[float, ...]  # after reward_processor; empty where scores_K is
    terminated: bool = False  # mean reward exceeded early_termination_threshold
    first_agent: int = 0  # index of the first of those that act here
    # of all agents of the team, after reward_processor; empty: they share ``rewards_K``
    own_rewards_KN: tuple[tuple[float, ...], ...] = ()

    def rewards_of(self, agent: int) -> tuple[float, ...]:
        """Return an agent's reward for each joint action: its separate one, or the team's."""
        return tuple(reward_N[agent] for reward_N in self.own_rewards_KN) or self.rewards_K

    @property
    def acting(self) -> range:
        """The agents that act here."""
        return range(self.first_agent, self.first_agent + len(self.agents_N))

    @property
    def tokens(self) -> int:
        """Tokens that were sampled here."""
        return sum(len(c.token_ids) for turn in self.agents_N for c in turn.completions_G)


@dataclass(frozen=True, slots=True)
class Tree:
    """A task's scored rollout, read-only: nodes in breadth-first order, the root first."""

    task: Task
    nodes: tuple[Node, ...]
    joint_mode: JointMode
    handoff: Literal["random", "best"] | None
    # returns of greedy rollouts from each node on, each agent's; empty: there were none
    greedy_SN: tuple[tuple[float, ...], ...] = ()
    greedy_cost: tuple[int, int] = (0, 0)  # their scored joint actions and sampled tokens

    @property
    def num_agents(self) -> int:
        """The number of agents in the team, also where they act at separate nodes."""
        return max(node.acting.stop for node in self.nodes)

    @property
    def scored(self) -> int:
        """Joint actions that were scored, those of greedy rollouts included."""
        return sum(len(node.scores_K) for node in self.nodes) + self.greedy_cost[0]

    @property
    def tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(node.tokens for node in self.nodes) + self.greedy_cost[1]

    @property
    def final_score(self) -> Score:
        """The score of a chain's last turn."""
        return self.nodes[-1].scores_K[0]

    def answered(self) -> Iterator[tuple[int, int, AgentTurn]]:
        """Turn, agent, and what it read and wrote, at each node."""
        for node in self.nodes:
            yield from (
                (node.turn, *agent_turn)
                for agent_turn in zip(node.acting, node.agents_N, strict=True)
            )

    def scored_actions(self) -> list[JointAction]:
        """Return the joint actions that the reward has scored."""
        return [
            self.joint_action(index, action)
            for index, node in enumerate(self.nodes)
            for action in range(len(node.scores_K))
        ]

    def children(self, index: int) -> dict[int, int]:
        """Return joint action → index of the child node that it led to."""
        return {n.parent_action: i for i, n in enumerate(self.nodes) if n.parent == index}

    def turn_starts(self) -> list[int]:
        """Return the node where each node's turn began: itself if all agents act simultaneously."""
        starts: list[int] = []
        for index, node in enumerate(self.nodes):
            starts.append(index if node.first_agent == 0 else starts[node.parent])
        return starts

    def path(self, index: int, action: int) -> tuple[tuple[int, int, int], ...]:
        """Return node, agent and generation of each completion in a node's joint action.

        They are in the agents' order, up to those that act at the node.
        """
        node = self.nodes[index]
        acting = zip(node.acting, node.joint_actions_K[action], strict=True)
        here = tuple((index, agent, g) for agent, g in acting)
        if node.first_agent == 0:
            return here
        return (*self.path(node.parent, node.parent_action), *here)

    def team(self, index: int, action: int) -> tuple[tuple[AgentTurn, Completion], ...]:
        """Return each agent's prompt and completion of a scored joint action, in order."""
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
        """Return a scored joint action as texts, with those of the turns before it."""
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
    """One completion that a program has asked an agent for."""

    agent: int
    number: int  # of the agent's calls in its episode, from 0
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion

    @property
    def as_turn(self) -> AgentTurn:
        return AgentTurn(self.prompt, self.prompt_ids, (self.completion,))

    def without_support(self) -> Call:
        return replace(self, completion=replace(self.completion, support=None))


class AgentReward(NamedTuple):
    """A reward of one agent in an episode, after reward_processor."""

    calls: int  # that the agent had made by then
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of a program for one task, read-only."""

    calls: tuple[Call, ...]  # in the order in which they were made
    score: Score  # raw
    reward: float  # ``score.value`` after reward_processor
    paid_N: tuple[tuple[AgentReward, ...], ...]  # each agent's; the last is the final score's
    joint_action: JointAction | None = None  # whose score it is, where the run's reward scored it
    error: str | None = None  # why it ended early, where ``program.on_error`` is zero

    def calls_of(self, agent: int) -> tuple[Call, ...]:
        """Return the calls of one agent, in order."""
        return tuple(call for call in self.calls if call.agent == agent)


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """A task's episodes, played side by side: for programs what a tree is for turns."""

    task: Task
    names_N: tuple[str, ...]  # of the agents
    episodes_G: tuple[Episode, ...]
    greedy: Episode | None = None  # sampled greedily, where returns are compared with it

    @property
    def num_agents(self) -> int:
        return len(self.names_N)

    @property
    def scored(self) -> int:
        """Episodes, the greedy one included: they count as scored joint actions."""
        return len(self._all)

    @property
    def tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(len(c.completion.token_ids) for e in self._all for c in e.calls)

    @property
    def _all(self) -> tuple[Episode, ...]:
        return self.episodes_G if self.greedy is None else (*self.episodes_G, self.greedy)

    @property
    def final_score(self) -> Score:
        """The score of a single episode."""
        return self.episodes_G[-1].score

    def answered(self) -> Iterator[tuple[int, int, AgentTurn]]:
        """Turn, agent, and what it read and wrote, of each call; an episode is one turn."""
        return ((1, call.agent, call.as_turn) for e in self.episodes_G for call in e.calls)

    def scored_actions(self) -> list[JointAction]:
        """Return the joint actions that the reward has scored."""
        return [e.joint_action for e in self.episodes_G if e.joint_action is not None]

    def without_support(self) -> EpisodeGroup:
        """Return the group without its tokens' support, for other processes."""
        return replace(
            self,
            greedy=None,
            episodes_G=tuple(
                replace(e, calls=tuple(call.without_support() for call in e.calls))
                for e in self.episodes_G
            ),
        )


RolloutResult = Tree | EpisodeGroup  # what a rollout makes of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One completion that an agent chose: in a turn of a tree, or as a call of a program.

    ``state``, ``unit`` and ``node`` are numbers of what decisions have in common
    (``comlrl/credit/decisions.py``); a node's are those of one agent.
    """

    agent: int
    turn: int = 1  # 1-based
    state: int = 0
    unit: int = 0
    node: int = 0
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion
    before: int  # number of the same agent's decision before it; −1 if there is none
    # numbers of decisions: the latest prompts of all agents that were asked by then
    read: tuple[int, ...]
    reward: float  # of its first joint action, or what its agent was paid until its next call
    returns_G: tuple[float, ...]  # that it is compared with; its own among them
    place: int  # of its return among them
    greedy_return: float | None = None  # from the same point on, where there is a greedy rollout


@dataclass(frozen=True, slots=True)
class Attempt:
    """A scored joint action that is to be tried again."""

    task: Task
    completions_N: tuple[str, ...]
    score: Score
    turn: int  # the turn that produced it, 1-based
