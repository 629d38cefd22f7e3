"""Rollouts → the numbered decisions of agents, to which every algorithm assigns credit.

A decision is one completion that one agent chose: a tree has one for each completion of each node,
a program one for each call. Decision d is the d-th of the step, in this process. If rollouts are
chains (G joint actions at turn 1, each followed by one), joint action c of N agents consists of the
decisions c · N … c · N + N − 1.

A state is what a critic values and minibatches never split: the point at which a joint action is
scored, or a task with all of its episodes. A unit is what an update on whole trees never splits: a
turn from one point on, or a task with its episodes. Such an update averages over nodes.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import NamedTuple

from comlrl.credit.returns import completion_returns, joint_returns_of_agents, return_to_go
from comlrl.types import Decision, EpisodeGroup, RolloutResult, Row, Tree
from comlrl.types.token_rows import importances_of


class View(NamedTuple):
    """Prompts from which a critic of whole turns computes the value of some decisions."""

    numbers: tuple[int, ...]  # of the decisions to value
    read: tuple[int, ...]  # of the decisions whose prompts the critic sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """All decisions of a training step's rollouts, in this process."""

    numbered: tuple[Decision, ...]
    states_B: tuple[int, ...]  # number of states of each task
    units_B: tuple[int, ...]  # number of units of each task
    nodes_U: tuple[Counter[int], ...]  # for each unit, the number of nodes of each agent

    def __getitem__(self, number: int) -> Decision:
        return self.numbered[number]

    def of_unit(self) -> list[dict[tuple[int, int], list[int]]]:
        """Return, for each unit, the numbers of the decisions of each (agent, node)."""
        grouped: list[dict[tuple[int, int], list[int]]] = [{} for _ in self.nodes_U]
        for number, decision in enumerate(self.numbered):
            key = decision.agent, decision.node
            grouped[decision.unit].setdefault(key, []).append(number)
        return grouped

    def rows(self, agents: Sequence[int], weight_T: Sequence[float]) -> list[list[Row]]:
        """Return, for each state, the rows of these agents' decisions with their turns' weights."""
        states, place = sum(self.states_B), {agent: at for at, agent in enumerate(agents)}
        numbers_SN: list[list[list[int]]] = [[[] for _ in agents] for _ in range(states)]
        for number, decision in enumerate(self.numbered):
            if decision.agent in place:
                numbers_SN[decision.state][place[decision.agent]].append(number)
        return [
            [row for numbers in numbers_N for row in self.packed(numbers, weight_T)]
            for numbers_N in numbers_SN
        ]

    def packed(self, numbers: Iterable[int], weight_T: Sequence[float]) -> list[Row]:
        """Pack decisions of one agent into rows that share prompts, with their turns' weights.

        A prompt that extends another is stored as that prompt and a context (``Row.contexts``),
        which is computed once if several decisions share it.
        """
        shared: dict[tuple[int, ...], list[int]] = {}
        for number in numbers:
            ids = self[number].prompt_ids
            base = next((prompt for prompt in shared if ids[: len(prompt)] == prompt), ids)
            shared.setdefault(base, []).append(number)
        return [self._row(base, members, weight_T) for base, members in shared.items()]

    def _row(
        self, prompt_ids: tuple[int, ...], numbers: Sequence[int], weight_T: Sequence[float]
    ) -> Row:
        decisions = [self[number] for number in numbers]
        contexts = [d.prompt_ids[len(prompt_ids) :] for d in decisions]
        return Row(
            prompt_ids,
            tuple(c + d.completion.token_ids for c, d in zip(contexts, decisions, strict=True)),
            tuple(weight_T[d.turn - 1] * d.completion.importance for d in decisions),
            tuple(numbers),
            support=tuple(
                d.completion.support for d in decisions if d.completion.support is not None
            ),
            importances=importances_of([decision.completion for decision in decisions]),
            contexts=tuple(map(len, contexts)) if any(contexts) else (),
        )

    def chains(self, agents: Iterable[int]) -> list[list[int]]:
        """Return chains of an agent's consecutive decisions, from a task's first to its last."""
        wanted = set(agents)
        chain_of: dict[int, list[int]] = {}  # by the number of the chain's latest decision
        chains = []
        for number, decision in enumerate(self.numbered):
            if decision.agent not in wanted:
                continue
            if decision.before < 0:
                chain: list[int] = []
                chains.append(chain)
            else:
                chain = chain_of.pop(decision.before)  # a chain never branches
            chain.append(number)
            chain_of[number] = chain
        return chains

    def views(self, agents: Iterable[int], centralized: bool) -> list[list[View]]:
        """Return, for each state, the views of a critic of these agents: the latest prompts of all
        agents at the time of the decision (``centralized``), or only those of the deciding agent.

        Later prompts are excluded: they may contain the decision's completion, and the advantage
        would then no longer measure its effect.
        """
        wanted, numbers_of = set(agents), defaultdict[tuple[int, tuple[int, ...]], list[int]](list)
        for number, decision in enumerate(self.numbered):
            if decision.agent in wanted:
                read = decision.read
                if not centralized:
                    read = tuple(d for d in read if self[d].agent == decision.agent)
                numbers_of[decision.state, read].append(number)
        views: list[list[View]] = [[] for _ in range(sum(self.states_B))]
        for (state, read), numbers in numbers_of.items():
            views[state].append(View(tuple(numbers), read))
        return views

    @property
    def prompts(self) -> list[int]:
        """Return the decisions whose prompts a critic may see; every other decision has the same
        prompt as one of them."""
        return sorted({number for decision in self.numbered for number in decision.read})

    def reward(self, number: int) -> float:
        """Return the processed reward of a decision's agent until its next decision."""
        return self[number].reward


def decisions_of(
    rolled: Sequence[RolloutResult], discount: float = 1.0, leniency: float = 0.0
) -> Decisions:
    """Collect the decisions of a step's rollouts. ``discount`` and ``leniency`` define the returns
    by which siblings are compared."""
    numbered: list[Decision] = []
    states_B, units_B, nodes_U = list[int](), list[int](), list[Counter[int]]()
    for result in rolled:
        offset, states, units = len(numbered), sum(states_B), len(nodes_U)
        decisions, of_units = _decisions(result, discount, leniency)
        numbered += [_moved(decision, offset, states, units) for decision in decisions]
        states_B.append(1 + max((d.state for d in decisions), default=0))
        units_B.append(len(of_units))
        nodes_U += of_units
    return Decisions(
        numbered=tuple(numbered),
        states_B=tuple(states_B),
        units_B=tuple(units_B),
        nodes_U=tuple(nodes_U),
    )


def _moved(decision: Decision, offset: int, states: int, units: int) -> Decision:
    """Renumber a decision among those of all tasks."""
    return replace(
        decision,
        state=decision.state + states,
        unit=decision.unit + units,
        before=decision.before + offset if decision.before >= 0 else -1,
        read=tuple(number + offset for number in decision.read),
    )


@singledispatch
def _decisions(
    result: RolloutResult, discount: float, leniency: float
) -> tuple[list[Decision], list[Counter[int]]]:
    """Return a task's decisions, and for each of its units the number of nodes of each agent."""
    raise TypeError(f"no rollout: {result!r}")


@_decisions.register
def _of_tree(
    tree: Tree, discount: float, leniency: float
) -> tuple[list[Decision], list[Counter[int]]]:
    starts = tree.turn_starts()
    unit_of = {start: unit for unit, start in enumerate(dict.fromkeys(starts))}
    nodes_U = [Counter[int]() for _ in unit_of]
    for start, node in zip(starts, tree.nodes, strict=True):
        nodes_U[unit_of[start]].update(node.acting)
    returns_N = joint_returns_of_agents(tree, discount)
    decisions: list[Decision] = []
    number_of: dict[tuple[int, int, int], int] = {}  # by (node, agent, generation)
    siblings: dict[tuple[int, int], tuple[float, ...]] = {}
    for state, index in enumerate(i for i, node in enumerate(tree.nodes) if node.scores_K):
        scored, first = tree.nodes[index], tree.nodes[starts[index]]
        before = tree.path(first.parent, first.parent_action) if first.parent >= 0 else ()
        following = itertools.count(len(decisions))
        read = [number_of.get(key, -1) for key in tree.path(index, 0)]
        read = [number if number >= 0 else next(following) for number in read]
        rewards_NK = [scored.rewards_of(agent) for agent in range(len(read))]
        for action in range(len(scored.scores_K)):
            for agent, key in enumerate(tree.path(index, action)):
                if key in number_of:
                    continue
                at, _, g = key
                node = tree.nodes[at]
                turn = node.agents_N[agent - node.first_agent]
                if (at, agent) not in siblings:
                    of_node = completion_returns(node, agent, returns_N[agent][at], leniency)
                    siblings[at, agent] = tuple(of_node)
                number_of[key] = len(decisions)
                decisions.append(
                    Decision(
                        agent=agent,
                        turn=node.turn,
                        state=state,
                        unit=unit_of[starts[index]],
                        node=at,
                        prompt=turn.prompt,
                        prompt_ids=turn.prompt_ids,
                        completion=turn.completions_G[g],
                        before=number_of[before[agent]] if before else -1,
                        read=tuple(read[: node.acting.stop]),
                        reward=rewards_NK[agent][action],
                        returns_G=siblings[at, agent],
                        place=g,
                        greedy_return=tree.greedy_SN[at][agent] if tree.greedy_SN else None,
                    )
                )
    return decisions, nodes_U


@_decisions.register
def _of_episodes(
    group: EpisodeGroup, discount: float, _: float
) -> tuple[list[Decision], list[Counter[int]]]:
    decisions: list[Decision] = []
    siblings: dict[tuple[int, int], tuple[float, ...]] = {}  # returns by (agent, j), of j-th calls
    for place, episode in enumerate(group.episodes_G):
        latest: dict[int, int] = {}  # agent → its latest decision
        made = Counter[int]()
        paid = defaultdict[tuple[int, int], float](float)  # reward by (agent, j), after j calls
        for agent, rewards in enumerate(episode.paid_N):
            for calls, value in rewards:
                paid[agent, calls] += value
        for call in episode.calls:
            agent, before = call.agent, latest.get(call.agent, -1)
            made[agent] += 1
            key = agent, made[agent]
            if key not in siblings:
                siblings[key] = tuple(return_to_go(e, *key, discount) for e in group.episodes_G)
            latest[agent] = len(decisions)
            greedy = None if group.greedy is None else return_to_go(group.greedy, *key, discount)
            decisions.append(
                Decision(
                    agent=agent,
                    prompt=call.prompt,
                    prompt_ids=call.prompt_ids,
                    completion=call.completion,
                    before=before,
                    read=tuple(sorted(latest.values())),
                    reward=paid[key],
                    returns_G=siblings[key],
                    place=place,
                    greedy_return=greedy,
                )
            )
    return decisions, [Counter(range(group.num_agents))]
