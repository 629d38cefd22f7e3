"""Rollout of a batch of tasks as trees, which grow level by level.

A level is a stage of a turn: all agents, or one agent in sequential turns. It needs one ``sample``
call (one generation call for each acting agent), and the last level of a turn one ``score`` call,
for any number of tasks and nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from comlrl.credit.returns import mean
from comlrl.keyed import uniforms
from comlrl.rollout.reading import History, PromptBuilder, Reading, State, texts
from comlrl.tasks.history import Exchange
from comlrl.tasks.prompts import Prompts
from comlrl.types import (
    AgentTurn,
    Attempt,
    Completion,
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
class _Pending:
    """A node that has prompts, but no completions yet."""

    state: State
    acting: range  # the agents of this stage
    readings: tuple[Reading, ...]  # their prompts


@dataclass(frozen=True, slots=True)
class _Action:
    """A joint action that may be continued."""

    pending: _Pending
    node: Node
    index: int  # of the node in its tree
    k: int

    @property
    def written(self) -> tuple[Completion, ...]:
        """The completions of this turn so far, in the order of the agents."""
        return _written(self.pending, self.node.agents_N, self.node.joint_actions_K[self.k])


@dataclass(slots=True)
class _Chain:
    """A greedy rollout from the state of a node."""

    returns_N: list[float]  # each agent's discounted processed reward
    scored: int = 0  # joint actions
    tokens: int = 0  # sampled

    def add(self, node: Node, weight: float) -> None:
        for agent in range(len(self.returns_N)):
            self.returns_N[agent] += weight * sum(node.rewards_of(agent))
        self.scored += len(node.scores_K)
        self.tokens += node.tokens


class Rollout:
    """Rollout of tasks as scored trees, without state between calls."""

    def __init__(
        self,
        sampler: Sampler,
        reward: Reward,
        transition: Transition,
        prompts: Prompts,
        *,
        seed: int,
        history: History | None = None,
        process: Callable[[float], float] = lambda reward: reward,
        own_rewards: bool = False,
    ) -> None:
        """Initialize the rollout.

        ``process``: the reward processor. ``own_rewards``: agents learn from ``Score.by_agent`` if
        a score has it, instead of from the team's value.
        """
        self.sampler, self.reward, self.transition = sampler, reward, transition
        self.seed, self.process, self.prompts = seed, process, prompts
        self.returns_by_agent = own_rewards  # each agent has a separate return
        self.builder = PromptBuilder(sampler, prompts, history or History())

    def grow(
        self,
        tasks: Sequence[Task],
        shape: Shape,
        sampling: Sampling,
        key: tuple,
        greedy_discount: float | None = None,
    ) -> list[Tree]:
        """Grow one tree per task.

        ``key``: phase and training step, a part of every sample's key. ``greedy_discount``: also
        roll out greedily from every node, with this discount; None: do not.
        """
        grown = self._grow(tasks, shape, sampling, [key] * len(tasks))
        trees = [tree for tree, _ in grown]
        if greedy_discount is None:
            return trees
        starts = [[_greedy(pending) for pending in pendings] for _, pendings in grown]
        chains = iter(
            self._chains([*itertools.chain(*starts)], shape.chain, sampling.greedy, greedy_discount)
        )
        return [
            _with_greedy(tree, [next(chains) for _ in tree_starts])
            for tree, tree_starts in zip(trees, starts, strict=True)
        ]

    def grow_each(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, keys: Sequence[tuple]
    ) -> list[Tree]:
        """Grow trees as ``grow`` does, with a key for each, so that a task may occur repeatedly."""
        return [tree for tree, _ in self._grow(tasks, shape, sampling, keys)]

    def by(self, sampler: Sampler, transition: Transition | None = None) -> Rollout:
        """Return a copy with another sampler, and optionally another transition."""
        return Rollout(
            sampler, self.reward, transition or self.transition, self.prompts,
            seed=self.seed, history=self.builder.history, process=self.process,
            own_rewards=self.returns_by_agent,
        )  # fmt: skip

    def _grow(
        self, tasks: Sequence[Task], shape: Shape, sampling: Sampling, keys: Sequence[tuple]
    ) -> list[tuple[Tree, list[_Pending]]]:
        nodes: list[list[Node]] = [[] for _ in tasks]
        states: list[list[_Pending]] = [[] for _ in tasks]
        frontier = [
            self._root(index, task, key, shape, sampling)
            for index, (task, key) in enumerate(zip(tasks, keys, strict=True))
        ]
        while frontier:
            level = self._expand(frontier, shape, sampling)
            indices = []
            for pending, node in zip(frontier, level, strict=True):
                indices.append(len(nodes[pending.state.tree]))
                nodes[pending.state.tree].append(node)
                states[pending.state.tree].append(pending)
            frontier = self._children(frontier, level, indices, shape, sampling)
        return [
            (Tree(task, tuple(nodes[i]), shape.joint_mode, shape.handoff), states[i])
            for i, task in enumerate(tasks)
        ]

    def _root(
        self, index: int, task: Task, key: tuple, shape: Shape, sampling: Sampling
    ) -> _Pending:
        prompt_N = self.prompts.first(task, shape.num_agents)
        past: tuple[tuple[Exchange, ...], ...] = ((),) * shape.num_agents
        nobody = (None,) * shape.num_agents
        state = State(
            tree=index,
            task=task,
            key=key,
            turn=1,
            parent=-1,
            parent_action=-1,
            path=(),
            past_N=past,
            prompt_N=prompt_N,
            latent_N=nobody,
        )
        return self._pending(state, shape, sampling)

    def _pending(self, state: State, shape: Shape, sampling: Sampling) -> _Pending:
        acting = next(stage for stage in shape.stages if stage.start == len(state.written))
        readings = tuple(
            self.builder.read(state, agent, sampling.for_agent(agent)) for agent in acting
        )
        return _Pending(state, acting, readings)

    def _expand(self, frontier: Sequence[_Pending], shape: Shape, sampling: Sampling) -> list[Node]:
        """Sample and score pending nodes, all of the same turn and stage."""
        acting = frontier[0].acting
        count = shape.generations(acting.start, frontier[0].state.turn)
        requests_N = [
            [self._request(p, agent, shape) for p in frontier if agent in p.acting]
            for agent in range(shape.num_agents)
        ]
        sampled_N = self.sampler.sample(requests_N, sampling)
        turns = [
            tuple(
                _turn(reading, sampled_N[agent][index])
                for agent, reading in zip(acting, pending.readings, strict=True)
            )
            for index, pending in enumerate(frontier)
        ]
        joint = _joint_actions(shape.joint_mode, len(acting), count)
        scored = joint if acting.stop == shape.num_agents else ()
        actions = [
            pending.state.joint_action(_written(pending, agent_turns, action))
            for pending, agent_turns in zip(frontier, turns, strict=True)
            for action in scored
        ]
        scores = iter(self.reward.score(actions) if scored else ())
        return [
            self._node(pending, agent_turns, joint, [next(scores) for _ in scored], shape)
            for pending, agent_turns in zip(frontier, turns, strict=True)
        ]

    def _request(self, pending: _Pending, agent: int, shape: Shape) -> Request:
        state = pending.state
        count = shape.generations(pending.acting.start, state.turn)
        return Request(
            pending.readings[agent - pending.acting.start].ids,
            tuple(
                (self.seed, *state.key, state.task.task_id, state.path, agent, g)
                for g in range(count)
            ),
            state.latent_N[agent],
            task_id=state.task.task_id,
        )

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
        terminated = threshold is not None and bool(rewards) and mean(list(rewards)) > threshold
        return Node(
            turn=pending.state.turn,
            parent=pending.state.parent,
            parent_action=pending.state.parent_action,
            agents_N=turns,
            joint_actions_K=joint,
            scores_K=tuple(scores),
            rewards_K=rewards,
            terminated=terminated,
            first_agent=pending.acting.start,
            own_rewards_KN=self._own_rewards(scores, shape.num_agents),
        )

    def _own_rewards(self, scores: Sequence[Score], agents: int) -> tuple[tuple[float, ...], ...]:
        """Return each agent's processed rewards of joint actions; empty if all share one reward."""
        if not self.returns_by_agent or all(score.by_agent is None for score in scores):
            return ()
        return tuple(
            tuple(map(self.process, score.by_agent or (score.value,) * agents)) for score in scores
        )

    def _children(
        self,
        frontier: Sequence[_Pending],
        level: Sequence[Node],
        indices: Sequence[int],
        shape: Shape,
        sampling: Sampling,
    ) -> list[_Pending]:
        """Return the next level: the turn's next stage, or the next turn."""
        actions = [
            _Action(pending, node, index, k)
            for pending, node, index in zip(frontier, level, indices, strict=True)
            for k in range(len(node.joint_actions_K))
        ]
        if frontier[0].acting.stop < shape.num_agents:
            states = [_within_turn(action) for action in actions]
        else:
            states = self._next_turn(actions, shape)
        return [self._pending(state, shape, sampling) for state in states]

    def _next_turn(self, actions: Sequence[_Action], shape: Shape) -> list[State]:
        """Return the states after every joint action that is continued, with feedback on each."""
        turns: dict[tuple, list[_Action]] = {}  # by the states in which they began
        for action in actions:
            if action.node.turn < shape.num_turns and not action.node.terminated:
                state = action.pending.state
                turns.setdefault((state.tree, state.start), []).append(action)
        chosen = [
            a for turn_actions in turns.values() for a in self._handed_on(turn_actions, shape)
        ]
        if not chosen:
            return []
        attempts = [
            Attempt(a.pending.state.task, texts(a.written), a.node.scores_K[a.k], a.node.turn)
            for a in chosen
        ]
        feedback = self.transition(attempts)
        return [_after_turn(a, feedback_N) for a, feedback_N in zip(chosen, feedback, strict=True)]

    def _handed_on(self, actions: Sequence[_Action], shape: Shape) -> Sequence[_Action]:
        """Return the joint actions of a turn that are continued."""
        if shape.handoff is None:
            return actions
        count = min(shape.handoff_width, len(actions))
        left = list(range(len(actions)))
        if shape.handoff == "best":  # ties: the lowest index
            rewards = [action.node.rewards_K[action.k] for action in actions]
            chosen = sorted(left, key=lambda i: (-rewards[i], i))[:count]
        else:
            state = actions[0].pending.state
            drawn = uniforms(
                (self.seed, *state.key, state.task.task_id, state.start, "handoff"), count
            )
            chosen = [left.pop(int(number * len(left))) for number in drawn]
        return [actions[i] for i in sorted(chosen)]

    def _chains(
        self,
        starts: Sequence[_Pending],
        chain: Shape,
        sampling: Sampling,
        discount: float,
    ) -> list[_Chain]:
        """Roll out greedily from each start, with one joint action per turn.

        A chain holds each agent's discounted processed rewards, and counts of scores and tokens.
        """
        chains = [_Chain([0.0] * chain.num_agents) for _ in starts]
        for turn, stage in itertools.product(range(1, chain.num_turns + 1), chain.stages):
            at = [i for i, p in enumerate(starts) if (p.state.turn, p.acting) == (turn, stage)]
            frontier = [starts[i] for i in at]
            while frontier:
                level = self._expand(frontier, chain, sampling)
                weight = discount ** (level[0].turn - turn)
                for i, node in zip(at, level, strict=True):
                    chains[i].add(node, weight)
                ended = level[0].turn == chain.num_turns and bool(level[0].scores_K)
                at = [i for i, n in zip(at, level, strict=True) if not (n.terminated or ended)]
                frontier = self._children(frontier, level, range(len(level)), chain, sampling)
        return chains


def _greedy(pending: _Pending) -> _Pending:
    """Return the same node, as the start of a greedy rollout."""
    state = replace(pending.state, key=(*pending.state.key, "greedy"))
    return replace(pending, state=state)


def _with_greedy(tree: Tree, chains_S: Sequence[_Chain]) -> Tree:
    """Return the tree with the greedy rollouts from its nodes."""
    return replace(
        tree,
        greedy_SN=tuple(tuple(chain.returns_N) for chain in chains_S),
        greedy_cost=(sum(c.scored for c in chains_S), sum(c.tokens for c in chains_S)),
    )


def _turn(reading: Reading, sampled_G: tuple[Completion, ...]) -> AgentTurn:
    """Return an agent's prompt and completions. Texts include the prefill, tokens do not."""
    if reading.prefill:
        sampled_G = tuple(replace(c, text=reading.prefill + c.text) for c in sampled_G)
    return AgentTurn(reading.prompt, reading.ids, sampled_G, reading.dropped)


def _within_turn(action: _Action) -> State:
    """Return the state in the same turn, where the next agent reads what was written."""
    pending = action.pending
    return replace(
        pending.state,
        parent=action.index,
        parent_action=action.k,
        path=(*pending.state.path, action.k),
        written=action.written,
        handed_on=(*pending.state.handed_on, *(r.handed_on for r in pending.readings)),
    )


def _after_turn(action: _Action, feedback_N: tuple[str, ...]) -> State:
    """Return the state in the next turn, where each agent reads feedback on its attempt."""
    state = _within_turn(action)
    past_N = tuple(
        (*past, Exchange(prompt, response, shown))
        for past, prompt, response, shown in zip(
            state.past_N, state.prompt_N, texts(state.written), state.handed_on, strict=True
        )
    )
    return replace(
        state,
        turn=state.turn + 1,
        past_N=past_N,
        prompt_N=feedback_N,
        latent_N=tuple(completion.latent for completion in state.written),
        written=(),
        handed_on=(),
        history=state.joint_action(state.written).as_past,
    )


def _joint_actions(mode: str, agents: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Return joint actions as indices of the agents' completions.

    align: the g-th completion of each agent. cross: the Cartesian product, the last agent fastest.
    counterfactual: those of align, and each of them with one agent's completion replaced by each of
    its siblings; in the order of cross.
    """
    aligned = tuple((g,) * agents for g in range(count))
    if mode == "align":
        return aligned
    if mode == "cross":
        return tuple(itertools.product(range(count), repeat=agents))
    replaced = {
        (*action[:agent], g, *action[agent + 1 :])
        for action in aligned
        for agent in range(agents)
        for g in range(count)
    }
    return tuple(sorted(replaced))


def _written(
    pending: _Pending, turns: Sequence[AgentTurn], action: Sequence[int]
) -> tuple[Completion, ...]:
    completions = (turn.completions_G[g] for turn, g in zip(turns, action, strict=True))
    return (*pending.state.written, *completions)
