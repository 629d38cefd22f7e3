"""Grows the trees level by level, for all tasks of a batch at once.

A level costs one ``sample`` call (one generation call for each agent) and one ``score`` call,
whatever the number of tasks and nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from comlrl.credit.returns import mean
from comlrl.keyed import uniforms
from comlrl.tasks.history import Exchange, next_prompt, shorten
from comlrl.tasks.prompts import Prompts
from comlrl.types import (
    AgentTurn,
    Attempt,
    JointAction,
    Latent,
    Message,
    Node,
    Request,
    Reward,
    Sampler,
    Sampling,
    Score,
    Shape,
    Task,
    Transition,
    Tree,
)


@dataclass(frozen=True, slots=True)
class History:
    """What of an agent's own past stands in its later prompts (``comlrl.tasks.history``)."""

    history: Literal["full", "last"] = "full"
    original_prompt: bool = False
    previous_response: bool = True


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy rollouts from the state of every node: what they earn, and what they cost."""

    returns_BS: list[list[float]]  # of each tree's nodes; processed and discounted
    scored: int  # joint actions
    tokens: int  # sampled


@dataclass(frozen=True, slots=True)
class _Pending:
    """A node whose prompts are known and whose completions are not."""

    tree: int
    task: Task
    turn: int
    parent: int
    parent_action: int
    path: tuple[int, ...]  # joint action taken at each turn before
    past_N: tuple[tuple[Exchange, ...], ...]
    told_N: tuple[str, ...]  # the newest text that each agent was told
    prompt_N: tuple[tuple[Message, ...], ...]
    prompt_ids_N: tuple[tuple[int, ...], ...]
    dropped_N: tuple[int, ...]
    latent_N: tuple[Latent | None, ...]  # each agent's at the turn before


class Rollout:
    """Tasks → scored trees. Holds no state between calls."""

    def __init__(
        self,
        sampler: Sampler,
        reward: Reward,
        transition: Transition,
        prompts: Prompts,
        *,
        seed: int,
        history: History = History(),
        process: Callable[[float], float] = lambda reward: reward,
    ) -> None:
        """``process``: the reward processor."""
        self.sampler, self.reward, self.transition = sampler, reward, transition
        self.prompts = prompts
        self.seed, self.history, self.process = seed, history, process

    def grow(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, key: tuple
    ) -> list[Tree]:
        """One tree for each task. ``key`` (phase, training step) goes into every sample's key."""
        return [tree for tree, _ in self._grow(tasks, shape, sampling, key)]

    def grow_with_greedy(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, key: tuple, discount: float
    ) -> tuple[list[Tree], Greedy]:
        """Trees, and the greedy rollouts from each node's state (ReMax)."""
        grown = self._grow(tasks, shape, sampling, key)
        starts = [pending for _, pendings in grown for pending in pendings]
        greedy = Sampling(0.0, sampling.max_new_tokens)
        returns, nodes = self._chains(starts, shape, greedy, key, discount)
        values = iter(returns)
        return [tree for tree, _ in grown], Greedy(
            [[next(values) for _ in pendings] for _, pendings in grown],
            sum(len(node.scores_K) for node in nodes),
            sum(node.tokens for node in nodes),
        )

    def _grow(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, key: tuple
    ) -> list[tuple[Tree, list[_Pending]]]:
        nodes: list[list[Node]] = [[] for _ in tasks]
        states: list[list[_Pending]] = [[] for _ in tasks]
        frontier = [self._root(index, task, shape, sampling) for index, task in enumerate(tasks)]
        while frontier:
            level = self._expand(frontier, shape, sampling, key)
            indices = []
            for pending, node in zip(frontier, level, strict=True):
                indices.append(len(nodes[pending.tree]))
                nodes[pending.tree].append(node)
                states[pending.tree].append(pending)
            frontier = self._children(frontier, level, indices, shape, sampling, key)
        return [
            (Tree(task, tuple(nodes[i]), shape.joint_mode, shape.handoff), states[i])
            for i, task in enumerate(tasks)
        ]

    def _root(self, index: int, task: Task, shape: Shape, sampling: Sampling) -> _Pending:
        told = self.prompts.first(task, shape.num_agents)
        prompts = tuple((Message("user", text),) for text in told)
        past: tuple[tuple[Exchange, ...], ...] = ((),) * shape.num_agents
        nobody = (None,) * shape.num_agents
        return self._pending(index, task, 1, -1, -1, (), past, told, prompts, nobody, sampling)

    def _pending(
        self,
        tree: int,
        task: Task,
        turn: int,
        parent: int,
        parent_action: int,
        path: tuple[int, ...],
        past_N: tuple[tuple[Exchange, ...], ...],
        told_N: tuple[str, ...],
        prompts_N: Sequence[tuple[Message, ...]],
        latent_N: tuple[Latent | None, ...],
        sampling: Sampling,
    ) -> _Pending:
        fitted = [
            shorten(prompt, partial(self._fits, agent, sampling))
            for agent, prompt in enumerate(prompts_N)
        ]
        prompts = tuple((*self.prompts.opening, *messages) for messages, _ in fitted)
        ids = tuple(self.sampler.encode(agent, prompt) for agent, prompt in enumerate(prompts))
        dropped = tuple(count for _, count in fitted)
        return _Pending(
            tree, task, turn, parent, parent_action, path, past_N, told_N, prompts, ids, dropped,
            latent_N,
        )  # fmt: skip

    def _fits(self, agent: int, sampling: Sampling, prompt: Sequence[Message]) -> bool:
        whole = (*self.prompts.opening, *prompt)
        return self.sampler.fits(self.sampler.encode(agent, whole), sampling)

    def _expand(
        self, frontier: Sequence[_Pending], shape: Shape, sampling: Sampling, key: tuple
    ) -> list[Node]:
        """Sample and score every pending node: one ``sample`` and one ``score`` call."""
        later = shape.later_generations or shape.num_generations
        count = shape.num_generations if frontier[0].turn == 1 else later
        requests_N = [
            [
                Request(
                    pending.prompt_ids_N[agent],
                    tuple(
                        (self.seed, *key, pending.task.task_id, pending.path, agent, g)
                        for g in range(count)
                    ),
                    pending.latent_N[agent],
                )
                for pending in frontier
            ]
            for agent in range(shape.num_agents)
        ]
        sampled_N = self.sampler.sample(requests_N, sampling)
        nodes = []
        actions: list[JointAction] = []
        for index, pending in enumerate(frontier):
            turns = tuple(
                AgentTurn(
                    pending.prompt_N[agent],
                    pending.prompt_ids_N[agent],
                    sampled_N[agent][index],
                    pending.dropped_N[agent],
                )
                for agent in range(shape.num_agents)
            )
            joint = _joint_actions(shape.joint_mode, shape.num_agents, count)
            nodes.append((pending, turns, joint))
            actions += [JointAction(pending.task, _texts(turns, action)) for action in joint]
        scores = iter(self.reward.score(actions))
        return [
            self._node(pending, turns, joint, [next(scores) for _ in joint], shape)
            for pending, turns, joint in nodes
        ]

    def _node(
        self,
        pending: _Pending,
        turns: tuple[AgentTurn, ...],
        joint: tuple[tuple[int, ...], ...],
        scores: list[Score],
        shape: Shape,
    ) -> Node:
        rewards = tuple(self.process(score.value) for score in scores)
        threshold = shape.early_termination_threshold
        terminated = threshold is not None and mean(list(rewards)) > threshold
        return Node(
            pending.turn,
            pending.parent,
            pending.parent_action,
            turns,
            joint,
            tuple(scores),
            rewards,
            terminated,
        )

    def _children(
        self,
        frontier: Sequence[_Pending],
        level: Sequence[Node],
        indices: Sequence[int],
        shape: Shape,
        sampling: Sampling,
        key: tuple,
    ) -> list[_Pending]:
        """The next level's states: feedback on every joint action that is taken further."""
        chosen = [
            (pending, node, index, k)
            for pending, node, index in zip(frontier, level, indices, strict=True)
            if node.turn < shape.num_turns and not node.terminated
            for k in self._handed_on(pending, node, shape, key)
        ]
        if not chosen:
            return []
        attempts = [
            Attempt(
                pending.task,
                _texts(node.agents_N, node.joint_actions_K[k]),
                node.scores_K[k],
                node.turn,
            )
            for pending, node, _, k in chosen
        ]
        children = []
        for (pending, node, index, k), attempt, told_N in zip(
            chosen, attempts, self.transition(attempts), strict=True
        ):
            past_N = tuple(
                (*past, Exchange(told, response))
                for past, told, response in zip(
                    pending.past_N, pending.told_N, attempt.completions_N, strict=True
                )
            )
            children.append(
                self._pending(
                    pending.tree,
                    pending.task,
                    node.turn + 1,
                    index,
                    k,
                    (*pending.path, k),
                    past_N,
                    told_N,
                    self._next_prompts(past_N, told_N),
                    tuple(turn.completions_G[0].latent for turn in node.agents_N),
                    sampling,
                )
            )
        return children

    def _next_prompts(
        self, past_N: Sequence[tuple[Exchange, ...]], told_N: Sequence[str]
    ) -> list[tuple[Message, ...]]:
        """What each agent reads, of its own past and what it is told now."""
        return [
            next_prompt(
                past,
                told,
                history=self.history.history,
                original_prompt=self.history.original_prompt,
                previous_response=self.history.previous_response,
            )
            for past, told in zip(past_N, told_N, strict=True)
        ]

    def _handed_on(self, pending: _Pending, node: Node, shape: Shape, key: tuple) -> Sequence[int]:
        """Which joint actions grow a child."""
        count = len(node.joint_actions_K)
        if shape.handoff is None:
            return range(count)
        if shape.handoff == "best":  # ties: the lowest index
            return [max(range(count), key=lambda k: (node.rewards_K[k], -k))]
        handoff = (self.seed, *key, pending.task.task_id, pending.path, "handoff")
        return [int(uniforms(handoff, 1)[0] * count)]

    def _chains(
        self,
        starts: Sequence[_Pending],
        shape: Shape,
        sampling: Sampling,
        key: tuple,
        discount: float,
    ) -> tuple[list[float], list[Node]]:
        """Discounted processed reward of one greedy joint action a turn, from each state on; and
        all the nodes that this took."""
        chain = Shape(
            shape.num_agents,
            shape.num_turns,
            1,
            early_termination_threshold=shape.early_termination_threshold,
        )
        returns, nodes = [0.0] * len(starts), []
        for turn in range(1, shape.num_turns + 1):
            frontier = [p for p in starts if p.turn == turn]
            at = [i for i, p in enumerate(starts) if p.turn == turn]
            weight = 1.0
            while frontier:
                level = self._expand(frontier, chain, sampling, (*key, "greedy"))
                nodes += level
                for i, node in zip(at, level, strict=True):
                    returns[i] += weight * node.rewards_K[0]
                go_on = [not n.terminated and n.turn < shape.num_turns for n in level]
                at = [i for i, go in zip(at, go_on, strict=True) if go]
                frontier = self._children(
                    frontier, level, range(len(level)), chain, sampling, (*key, "greedy")
                )
                weight *= discount
        return returns, nodes


def _joint_actions(mode: str, agents: int, count: int) -> tuple[tuple[int, ...], ...]:
    """align: the g-th of each agent. cross: the Cartesian product, the last agent fastest."""
    if mode == "align":
        return tuple((g,) * agents for g in range(count))
    return tuple(itertools.product(range(count), repeat=agents))


def _texts(turns: Sequence[AgentTurn], action: Sequence[int]) -> tuple[str, ...]:
    return tuple(turn.completions_G[g].text for turn, g in zip(turns, action, strict=True))
