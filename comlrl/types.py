"""The values that travel between the rooms, and the protocols at their doors.

Shape suffixes: ``_B`` tasks in a batch, ``_N`` agents, ``_G`` generations for each agent and
node, ``_K`` joint actions of a node (align: G, cross: G^N), ``_T`` turns, ``_R`` packed rows,
``_L`` tokens in a row, ``_A`` action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Union

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Task:
    """One problem in HumanEval's row format."""

    task_id: str
    prompt: str  # imports, helper functions and the entry point's stub with its docstring
    test: str  # source that defines ``check(candidate)``
    entry_point: str
    extra: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns


@dataclass(frozen=True, slots=True)
class Message:
    """One message of an agent's own conversation; a prompt is a tuple of them."""

    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """SHPPO: who an agent was at one state, kept from the rollout to the update. On the CPU."""

    observation_D: torch.Tensor  # its prompt, pooled
    epsilon_K: torch.Tensor  # standard normal; zeros where sampling was greedy
    value_K: torch.Tensor  # μ + σ ε: the ratios of all epochs use this very one
    mu_K: torch.Tensor
    memory_H: torch.Tensor  # after this turn


@dataclass(frozen=True, slots=True)
class Completion:
    """What an agent wrote once."""

    text: str  # decoded without special tokens
    token_ids: tuple[int, ...]  # every sampled token, the end-of-sequence token included
    finished: bool  # True: ended by itself; False: cut at max_new_tokens
    # log-probability of all its tokens under what drew them; not a number: unknown, or greedy.
    # Up to rounding, which depends on the batch: not compared.
    logprob: float = field(default=math.nan, compare=False)
    latent: Latent | None = field(default=None, compare=False, repr=False)  # one for all siblings


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a rollout."""

    num_agents: int
    num_turns: int
    num_generations: int
    joint_mode: Literal["align", "cross"] = "align"
    handoff: Literal["random", "best"] | None = None
    early_termination_threshold: float | None = None
    later_generations: int | None = None  # at turns 2+; null: num_generations (chains: 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, to be completed once for each key; a key identifies a completion's randomness."""

    prompt_ids: tuple[int, ...]
    keys_G: tuple[tuple[Any, ...], ...]
    before: Latent | None = None  # SHPPO: the agent's own at the turn before
    latent_K: torch.Tensor | None = None  # SHPPO: what the siblings are sampled under


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """What one agent read and wrote at one node."""

    prompt: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    completions_G: tuple[Completion, ...]
    turns_dropped: int = 0  # oldest turns left out so that the prompt fits max_length


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One test statement of ``check``, run against a joint program. Values are shortened reprs."""

    __test__ = False  # not a pytest class

    source: str
    passed: bool
    error_type: str | None = None  # "AssertionError", "TypeError", "Timeout", "Unsupported", …
    message: str | None = None
    line: int | None = None  # line of the joint program where the error was raised, 1-based
    expected: str | None = None
    actual: str | None = None
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SyntaxProblem:
    """Why the joint program does not compile; line and column are 1-based, in ``program``."""

    message: str
    line: int | None
    column: int | None
    text: str | None = None  # the offending source line


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """A joint program's reward, term by term, and the facts behind it.

    The first seven fields are contributions to ``total`` (``aux_ignored`` is ≤ 0).
    """

    aux_defined: float = 0.0
    main_defined: float = 0.0
    syntax: float = 0.0
    tests: float = 0.0
    uses_aux: float = 0.0
    not_wrapper: float = 0.0
    aux_ignored: float = 0.0
    helpers: tuple[str, ...] = ()  # names that the team was to define: "aux", "aux2", …
    defined: tuple[str, ...] = ()  # of helpers and entry point, those found with a return
    called: tuple[str, ...] = ()  # helpers that main calls
    ignored: tuple[str, ...] = ()  # helpers that main calls somewhere without reading the result
    wrapper: bool = False  # main only hands on aux's result
    # helpers without whose results a test fails; None: not measured, or not all tests passed
    needed: tuple[str, ...] | None = None
    syntax_error: SyntaxProblem | None = None
    outcomes: tuple[TestOutcome, ...] = ()  # empty where scoring stopped before the tests
    program: str = ""  # preamble + helpers + main, as it was run
    isolation: str = "none"  # what the sandbox used: "bubblewrap", "unshare", "limits"
    seconds: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.aux_defined
            + self.main_defined
            + self.syntax
            + self.tests
            + self.uses_aux
            + self.not_wrapper
            + self.aux_ignored
        )

    @property
    def passed_all(self) -> bool:
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    @property
    def test_fraction(self) -> float:
        """Share of tests passed; 0 where scoring stopped before the tests."""
        return sum(o.passed for o in self.outcomes) / len(self.outcomes) if self.outcomes else 0.0


@dataclass(frozen=True, slots=True)
class JointAction:
    """One completion from each agent for one task, helpers first and main last."""

    task: Task
    completions_N: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and, where it came from running code, its breakdown."""

    value: float
    breakdown: RewardBreakdown | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One state of one task's tree, with all that was sampled and scored there."""

    turn: int  # 1-based
    parent: int  # index into Tree.nodes; -1 for the root
    parent_action: int  # which joint action of the parent led here; -1 for the root
    agents_N: tuple[AgentTurn, ...]
    joint_actions_K: tuple[tuple[int, ...], ...]  # each agent's generation index
    scores_K: tuple[Score, ...]  # raw
    rewards_K: tuple[float, ...]  # after reward_processor
    terminated: bool = False  # mean reward exceeded early_termination_threshold

    @property
    def tokens(self) -> int:
        """Tokens that all agents sampled here."""
        return sum(len(c.token_ids) for turn in self.agents_N for c in turn.completions_G)


@dataclass(frozen=True, slots=True)
class Tree:
    """A task's scored rollout, read-only: nodes in breadth-first order, the root first."""

    task: Task
    nodes: tuple[Node, ...]
    joint_mode: Literal["align", "cross"]
    handoff: Literal["random", "best"] | None

    def children(self, index: int) -> dict[int, int]:
        """Joint action → index of the child node that it led to."""
        return {n.parent_action: i for i, n in enumerate(self.nodes) if n.parent == index}


@dataclass(frozen=True, slots=True)
class Span:
    """A training step's part of the run: the progress, 0 to 1, before and behind it."""

    start: float
    end: float

    def at(self, done: int, count: int) -> float:
        """The progress before the next of a step's ``count`` updates, ``done`` of them made."""
        return self.start + (self.end - self.start) * done / count


@dataclass(frozen=True, slots=True)
class Attempt:
    """A scored joint action that is to be tried again."""

    task: Task
    completions_N: tuple[str, ...]
    breakdown: RewardBreakdown | None
    turn: int  # the turn that produced it, 1-based


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of one agent and completions of it, each with a coefficient and a number."""

    prompt_ids: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]  # token ids of each
    weights: tuple[float, ...]  # coefficient of each on each of its tokens
    indices: tuple[int, ...]  # the caller's number for each

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.completions))


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed rows of one agent. A row is one node's prompt followed by its completions.

    ``segment_RL``: −1 padding, 0 prompt, s ≥ 1 the s-th completion of the row. A token sees the
    prompt and its own segment up to itself. ``action_mask_RL`` marks the tokens that the policy
    chose (end-of-sequence included, padding never); the distribution that chose token (r, l) is
    the one at row r, column ``previous_RL[r, l]``.
    """

    token_ids_RL: torch.Tensor  # int64
    positions_RL: torch.Tensor  # int64, restarted after the prompt for each segment
    segment_RL: torch.Tensor  # int64
    previous_RL: torch.Tensor  # int64
    action_mask_RL: torch.Tensor  # bool
    weight_RL: torch.Tensor  # float64: a completion's coefficient on each of its tokens
    completion_RL: torch.Tensor  # int64: index of the completion that a token belongs to, or −1


class NonFiniteError(RuntimeError):
    """A logit, loss or gradient that is no number; ``batch`` is what gave it, where one is kept."""

    def __init__(
        self, text: str, batch: TokenBatch | None = None, agent: int | None = None
    ) -> None:
        super().__init__(text)
        self.batch, self.agent = batch, agent


class Sampler(Protocol):
    """Turns prompts into completions; the agents' models stand behind it."""

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]: ...

    def fits(self, prompt_ids: Sequence[int], sampling: Sampling) -> bool: ...

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]: ...


class Reward(Protocol):
    """Scores joint actions; state beyond a worker pool is not allowed."""

    def score(self, actions: Sequence[JointAction]) -> list[Score]: ...

    def close(self) -> None: ...


class Transition(Protocol):
    """An external mode: what each agent is told before it tries again, one text per agent."""

    def __call__(self, attempts: Sequence[Attempt]) -> list[tuple[str, ...]]: ...


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line of ``metrics.jsonl``."""

    step: int  # environment steps
    update: int
    epoch: int
    phase: Literal["train", "eval"]
    metrics: Mapping[str, float]


class Stateful(Protocol):
    """What keeps its state in tensors of its own making."""

    def state_tensors(self) -> Mapping[str, torch.Tensor]: ...

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None: ...


Part = Union[Stateful, "torch.nn.Module"]  # of what a checkpoint holds; a file each


class Trainer(Protocol):
    """An algorithm: what a train script builds, a loop paces and a checkpoint keeps."""

    def train(self) -> None: ...

    def parts(self) -> Mapping[str, Part]:
        """All that training changes, by the names of its files in a checkpoint."""


@dataclass(frozen=True, slots=True)
class LogMark:
    """How far a log is this run's own: up to the checkpoint that it goes on from."""

    lines: int = 0  # of metrics.jsonl
    update: int = -1
    env_steps: int = -1


class Logger(Protocol):
    """Takes metrics and episodes; any number of them run side by side."""

    def begin(self, mark: LogMark) -> None:
        """Before anything is logged: drop what an earlier process has logged behind ``mark``."""

    def log(self, record: LogRecord) -> None: ...

    def episodes(self, record: LogRecord, trees: Sequence[Tree]) -> None: ...

    def close(self) -> None: ...
