"""The values that travel between the rooms, and the protocols at their doors.

Shape suffixes: ``_B`` tasks in a batch, ``_N`` agents, ``_G`` generations for each agent and
node, ``_K`` joint actions of a node (align: G, cross: G^N), ``_T`` turns, ``_R`` packed rows,
``_L`` tokens in a row, ``_A`` action tokens.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: its name, and the fields of its row, which its domain alone reads."""

    task_id: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an agent's own conversation; a prompt is a tuple of them."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """The tokens that top-k and top-p left at each of L positions: what the policy chose from.

    A set of more than ``Sampling.max_support`` tokens has no ids. Its threshold lies half-way
    between the last token that was left and the first that was not: whoever reads it takes the
    tokens that are likelier than that by its own probabilities.
    """

    counts_L: torch.Tensor  # int32: ids of each position
    ids_I: torch.Tensor  # int32: all positions' ids, one after the other
    threshold_L: torch.Tensor  # float32: log-probability before truncation; +∞ where there are ids


@dataclass(frozen=True, slots=True)
class Completion:
    """What an agent wrote once."""

    text: str  # decoded without special tokens
    token_ids: tuple[int, ...]  # every sampled token, the end-of-sequence token included
    finished: bool  # True: ended by itself; False: cut at max_new_tokens
    # log-probability of all its tokens under what drew them; not a number: unknown, or greedy.
    # Up to rounding, which depends on the batch: not compared.
    logprob: float = field(default=math.nan, compare=False)
    # Its weight in its agent's gradient, where another than the trained policy has drawn it.
    importance: float = field(default=1.0, compare=False)
    # SHPPO: what the agent acted under (``comlrl.models.latents.Latent``), one for all siblings
    latent: Any = field(default=None, compare=False, repr=False)
    # of each token, on the CPU; None: nothing was truncated, or nobody learns from it
    support: SamplingSupport | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None
    max_support: int | None = (
        None  # tokens of a set in ``Completion.support``; None: no sets are stored
    )
    # of each agent, where not all sample alike; the fields above are then no agent's own
    by_agent: tuple[Sampling, ...] = ()

    def of(self, agent: int) -> Sampling:
        """How this agent's tokens are drawn."""
        return self.by_agent[agent] if self.by_agent else self

    @property
    def truncates(self) -> bool:
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    @property
    def longest(self) -> int:
        """Tokens of any agent's longest completion."""
        return max((own.max_new_tokens for own in self.by_agent), default=self.max_new_tokens)

    def with_sets(self, max_support: int | None) -> Sampling:
        """The same with another ``max_support``, for all agents."""
        by_agent = tuple(replace(own, max_support=max_support) for own in self.by_agent)
        return replace(self, max_support=max_support, by_agent=by_agent)

    @property
    def greedy(self) -> Sampling:
        """The likeliest tokens, of the same lengths at most."""
        by_agent = tuple(own.greedy for own in self.by_agent)
        return Sampling(0.0, self.max_new_tokens, by_agent=by_agent)


JointMode = Literal["align", "cross", "counterfactual"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a rollout."""

    num_agents: int
    num_turns: int
    num_generations: int
    joint_mode: JointMode = "align"
    handoff: Literal["random", "best"] | None = None
    early_termination_threshold: float | None = None
    later_generations: int | None = None  # at turns 2+; null: num_generations (chains: 1)
    handoff_width: int = 1  # joint actions of a turn that ``handoff`` hands on
    turn_order: Literal["simultaneous", "sequential"] = "simultaneous"
    num_generations_sequential: int = 2  # of every agent but the first of a sequential turn

    @property
    def stages(self) -> tuple[range, ...]:
        """A turn's stages: the agents that act at once, before the next read what they wrote."""
        if self.turn_order == "simultaneous":
            return (range(self.num_agents),)
        return tuple(range(agent, agent + 1) for agent in range(self.num_agents))

    @property
    def chain(self) -> Shape:
        """The same with one joint action a turn."""
        return replace(
            self, num_generations=1, later_generations=None, joint_mode="align", handoff=None,
            num_generations_sequential=1,
        )  # fmt: skip

    def generations(self, agent: int, turn: int = 1) -> int:
        """Completions of this agent at a node of this turn."""
        if agent > 0 and self.turn_order == "sequential":
            return self.num_generations_sequential
        return self.num_generations if turn == 1 else self.later_generations or self.num_generations

    def joint_actions(self, agents: int, generations: int) -> int:
        """K of a node at which so many agents have so many completions each."""
        if self.joint_mode == "align" or agents == 1:
            return generations
        if self.joint_mode == "cross" or agents == 2:
            return generations**agents
        return generations + agents * generations * (generations - 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be completed once for each key; a key identifies a completion's randomness."""

    prompt_ids: tuple[int, ...]
    keys_G: tuple[tuple[Any, ...], ...]
    before: Any = None  # SHPPO: the agent's own ``Latent`` at the turn before
    latent_K: torch.Tensor | None = None  # SHPPO: what the siblings are sampled under
    task_id: str = ""  # of the task, whose prompts begin alike


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """What one agent read and wrote at one node."""

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
    """What a joint action earned, and why."""

    value: float  # of the team; where ``by_agent`` is given, the mean of its task rewards
    parts: Mapping[str, float] = field(default_factory=dict)  # by name; they sum to ``task_value``
    passed: bool | None = None  # None: this reward has no notion of passing
    facts: Any = None  # what was found; only the domain that made them opens them
    task_reward: float | None = None  # the task's own reward, where ``value`` is a reward model's
    # each agent's own task reward, in their order; None: all share ``value``
    by_agent: tuple[float, ...] | None = None

    @property
    def task_value(self) -> float:
        """The task's reward, whatever was trained on."""
        return self.value if self.task_reward is None else self.task_reward


@dataclass(frozen=True, slots=True)
class Node:
    """One state of one task's tree, with all that was sampled there.

    In a simultaneous turn all agents act at one node. In a sequential turn each acts at a node of
    its own, below the completions that it has read; only the last agent's joint actions are scored.
    """

    turn: int  # 1-based
    parent: int  # index into Tree.nodes; -1 for the root
    parent_action: int  # which joint action of the parent led here; -1 for the root
    agents_N: tuple[AgentTurn, ...]  # of those that act here
    joint_actions_K: tuple[tuple[int, ...], ...]  # generation index of each that acts here
    scores_K: tuple[Score, ...]  # raw; empty where agents have still to act in this turn
    rewards_K: tuple[float, ...]  # after reward_processor; empty likewise
    terminated: bool = False  # mean reward exceeded early_termination_threshold
    first_agent: int = 0  # index of the first of those that act here
    # of all agents of the team, after reward_processor; empty: they share ``rewards_K``
    own_rewards_KN: tuple[tuple[float, ...], ...] = ()

    def rewards_of(self, agent: int) -> tuple[float, ...]:
        """What an agent learns from, for each joint action: its own reward, or the team's."""
        return tuple(own[agent] for own in self.own_rewards_KN) or self.rewards_K

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

    @property
    def num_agents(self) -> int:
        """Of the whole team, also where they act at separate nodes."""
        return max(node.acting.stop for node in self.nodes)

    @property
    def scored(self) -> int:
        """Joint actions that were scored."""
        return sum(len(node.scores_K) for node in self.nodes)

    @property
    def tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(node.tokens for node in self.nodes)

    @property
    def nodes_N(self) -> Counter[int]:
        """At how many nodes each agent acts."""
        return Counter(agent for node in self.nodes for agent in node.acting)

    @property
    def final_score(self) -> Score:
        """Of a chain: the score of its last turn."""
        return self.nodes[-1].scores_K[0]

    def children(self, index: int) -> dict[int, int]:
        """Joint action → index of the child node that it led to."""
        return {n.parent_action: i for i, n in enumerate(self.nodes) if n.parent == index}

    def turn_starts(self) -> list[int]:
        """For each node the one at which its turn began: itself, where all agents act at once."""
        starts: list[int] = []
        for index, node in enumerate(self.nodes):
            starts.append(index if node.first_agent == 0 else starts[node.parent])
        return starts

    def team(self, index: int, action: int) -> tuple[tuple[AgentTurn, Completion], ...]:
        """What each agent read and wrote for a scored joint action, in their order."""
        node = self.nodes[index]
        own = tuple(
            (turn, turn.completions_G[g])
            for turn, g in zip(node.agents_N, node.joint_actions_K[action], strict=True)
        )
        if node.first_agent == 0:
            return own
        return (*self.team(node.parent, node.parent_action), *own)

    def without_support(self) -> Tree:
        """The same without ``Completion.support``."""
        nodes = tuple(
            replace(n, agents_N=tuple(map(_without_support, n.agents_N))) for n in self.nodes
        )
        return replace(self, nodes=nodes)

    def joint_action(self, index: int, action: int) -> JointAction:
        """A scored joint action as texts, with those of the turns before it."""
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


@dataclass(frozen=True, slots=True)
class Call:
    """One completion that a program has asked an agent for."""

    agent: int
    number: int  # of the agent's calls in its episode, from 0
    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completion: Completion

    def without_support(self) -> Call:
        return replace(self, completion=replace(self.completion, support=None))


class Paid(NamedTuple):
    """A reward of one agent in an episode, after reward_processor."""

    calls: int  # that the agent had made by then
    value: float


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a program for one task, read-only."""

    calls: tuple[Call, ...]  # in the order in which they were made
    score: Score  # raw
    reward: float  # ``score.value`` after reward_processor
    paid_N: tuple[tuple[Paid, ...], ...]  # what each agent was paid; the last is the final score's
    joint_action: JointAction | None = None  # whose score it is, where the run's reward scored it
    error: str | None = None  # why it ended early, where ``program.on_error`` is zero

    def calls_of(self, agent: int) -> tuple[Call, ...]:
        """The calls of one agent, in their order."""
        return tuple(call for call in self.calls if call.agent == agent)


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """A task's episodes, played side by side: for programs what a tree is for turns."""

    task: Task
    names_N: tuple[str, ...]  # of the agents
    episodes_G: tuple[Episode, ...]

    @property
    def num_agents(self) -> int:
        return len(self.names_N)

    @property
    def scored(self) -> int:
        """Episodes, which count as scored joint actions."""
        return len(self.episodes_G)

    @property
    def tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(len(c.completion.token_ids) for e in self.episodes_G for c in e.calls)

    @property
    def nodes_N(self) -> Counter[int]:
        """Each agent has one state: its task."""
        return Counter(range(self.num_agents))

    @property
    def final_score(self) -> Score:
        """Of a single episode: its score."""
        return self.episodes_G[-1].score

    def without_support(self) -> EpisodeGroup:
        """The same without what the tokens were chosen from, for other processes."""
        return replace(
            self,
            episodes_G=tuple(
                replace(e, calls=tuple(call.without_support() for call in e.calls))
                for e in self.episodes_G
            ),
        )


Rolled = Tree | EpisodeGroup  # what a rollout makes of a task


@dataclass(frozen=True, slots=True)
class Attempt:
    """A scored joint action that is to be tried again."""

    task: Task
    completions_N: tuple[str, ...]
    score: Score
    turn: int  # the turn that produced it, 1-based


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of one agent and completions of it, each with a coefficient and a number."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]  # token ids of each
    weights: tuple[float, ...]  # coefficient of each on each of its tokens
    indices: tuple[int, ...]  # the caller's number for each
    support: tuple[SamplingSupport, ...] = ()  # of each; empty: they were chosen from all tokens
    # Leading tokens of each that continue its prompt and were not chosen; empty: none
    contexts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        prompt_ids: tuple[int, ...],
        completions: Sequence[Completion],
        weights: Iterable[float],
        indices: Iterable[int],
    ) -> Row:
        """Completions as they were sampled, their weights times their importance."""
        ids = tuple(completion.token_ids for completion in completions)
        own = tuple(
            w * completion.importance for w, completion in zip(weights, completions, strict=True)
        )
        support = tuple(
            completion.support for completion in completions if completion.support is not None
        )
        return cls(prompt_ids, ids, own, tuple(indices), support)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.completions))

    def part(self, start: int, end: int) -> Row:
        """These of its completions."""
        span = slice(start, end)
        return Row(
            self.prompt_ids, self.completions[span], self.weights[span], self.indices[span],
            self.support[span], self.contexts[span],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed rows of one agent. A row is one node's prompt followed by its completions.

    ``segment_RL``: −1 padding, 0 prompt, s ≥ 1 the s-th completion of the row. A token sees the
    prompt and its own segment up to itself. ``action_mask_RL`` marks the tokens that the policy
    chose (end-of-sequence included; padding and ``Row.contexts`` never); the distribution that
    chose token (r, l) is the one at row r, column ``previous_RL[r, l]``.
    """

    token_ids_RL: torch.Tensor  # int64
    positions_RL: torch.Tensor  # int64, restarted after the prompt for each segment
    segment_RL: torch.Tensor  # int64
    previous_RL: torch.Tensor  # int64
    action_mask_RL: torch.Tensor  # bool
    weight_RL: torch.Tensor  # float64: a completion's coefficient on each of its tokens
    completion_RL: torch.Tensor  # int64: index of the completion that a token belongs to, or −1
    support: SamplingSupport | None = None  # of each action; None: each was chosen from all tokens


class Sampler(Protocol):
    """Turns prompts into completions; the agents' models do the work."""

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]: ...

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool: ...

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]: ...


class Reward(Protocol):
    """Scores joint actions; state beyond a worker pool is not allowed.

    What it is made with: ``reward.arguments`` by name, and, for parameters of these names, the
    keys of ``sandbox`` (workers, timeout, memory_mb, isolation) and the run's ``num_turns``. A
    class may say by ``facts`` of what type ``Score.facts`` is: an external mode may ask for one,
    by ``reads``. A class whose scores have ``by_agent`` says so with the class attribute
    ``by_agent = True``.
    """

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        """One score for each joint action, in their order."""

    def for_evaluation(self) -> Reward:
        """The same reward where what it costs matters less: it may measure more. Both have the
        same workers, and closing one closes both."""
        return self

    def close(self) -> None:
        """Ends what was started."""


class Transition(Protocol):
    """An external mode: what each agent reads before it tries again, one text per agent."""

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]: ...


class Conventions(NamedTuple):
    """Which of several ways of sharing the work each agent followed in a joint action."""

    kind_N: tuple[str | None, ...]  # None: none that is known
    match: bool  # whether the agents counted on the same


class Domain(Protocol):
    """What a team works on: all that is particular to one kind of work.

    A class that names this one as its base has the methods below that have a body. Agents stand
    in one order everywhere: that of ``roles``.
    """

    fields: Sequence[str]  # that templates may name in braces
    # template: what every feedback ends with; empty where nothing follows a single turn
    revision: str = ""
    reward: Callable[..., Reward]  # the class of its reward, where ``reward.target`` is null

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        """A row of the data as a task. Raises ValueError, naming the field, for a bad one."""

    def roles(self, num_agents: int) -> tuple[str, ...]:
        """What the agents are called: the keys of ``prompts``, and names in logs and reports.
        Raises ValueError for a number of agents that cannot share this work."""

    def templates(self, num_agents: int) -> tuple[str, ...]:
        """Each agent's first prompt, its fields in braces."""

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        """For each agent, what stands in the place of each of ``fields``."""

    def parts(self, task: Task, num_agents: int) -> tuple[str, ...]:
        """What each agent writes, by name, as shown to other agents and an expert."""
        return self.roles(num_agents)

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        """What an agent that acts after others in its turn reads after its prompt of what they
        wrote. ``written``: the texts of those before it, in their order, at least one; cleaned of
        special tokens."""
        parts = self.parts(task, num_agents)[: len(written)]
        return "\n".join(
            f"{part}, as it was written:\n{textwrap.indent(text, '> ', lambda line: True)}\n"
            for part, text in zip(parts, written, strict=True)
        )

    def for_chat(self) -> Domain:
        """The same work in other words, for agents whose models have a chat template: of it,
        ``templates``, ``revision`` and ``handed_on`` are read."""
        return self

    def problem(self, task: Task) -> str:
        """The problem, as an expert and a reader of the report see it."""

    def check_arguments(self, arguments: Mapping[str, Any], num_agents: int) -> None:
        """Raises ValueError, in one line that begins with the key, for ``reward.arguments`` that
        have no effect on so many agents."""
        return

    def greatest_reward(self, num_agents: int) -> float | None:
        """The most that its own reward gives; None: not known."""
        return None

    def measures(self, action: JointAction, score: Score) -> Mapping[str, float]:
        """What is to be known of a joint action beyond its reward, by name. A metric is the mean
        over the joint actions that give it."""
        return {}

    def conventions(self, action: JointAction) -> Conventions | None:
        """How the agents shared the work, where several ways are known; None: they are not."""
        return None

    def described(self, score: Score) -> Mapping[str, Any]:
        """``score.facts`` as JSON, for the samples that are kept and shown."""
        return {}

    def solution(self, score: Score) -> str | None:
        """What the agents made together, as others score it; None: there is no such thing."""
        return None

    def modes(self) -> Mapping[str, Callable[..., Transition]]:
        """Its own external modes beside the general ones, by name; the first is its default.

        What one is made with: for parameters of these names, ``prompts`` (a
        ``comlrl.tasks.prompts.Prompts``) and the keys of ``external``.
        """
        return {}
