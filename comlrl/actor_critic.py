"""What PPO and SHPPO share: chains, numbers kept by token, minibatches, the clipped update.

A step's joint actions are numbered c = 0 … C − 1. Rollouts are chains (G at turn 1, one
afterwards), so joint action c is the c-th completion of every agent, and each chain runs from a
task's first turn to its last and never into another task.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from comlrl import distributed
from comlrl.advantages import gae
from comlrl.batching import Row, like_parts
from comlrl.generation import order
from comlrl.losses import clipped_policy, k3_kl
from comlrl.types import Node, Span, Task, TokenBatch, Tree


@dataclass(frozen=True, slots=True)
class Chains:
    """A step's states and joint actions, numbered through all of its trees."""

    nodes_S: tuple[Node, ...]
    tasks_S: tuple[Task, ...]
    paths_S: tuple[tuple[int, ...], ...]  # joint actions taken before, as in a rollout's keys
    parent_S: tuple[int, ...]  # the state one turn before, or −1
    actions_S: tuple[tuple[int, ...], ...]  # numbers of each state's joint actions
    state_C: tuple[int, ...]
    reward_C: tuple[float, ...]  # processed
    chains: tuple[tuple[int, ...], ...]  # joint actions turn by turn

    @property
    def states_B(self) -> list[int]:
        """How many states each tree has."""
        starts = [s for s, parent in enumerate(self.parent_S) if parent < 0]
        ends = [*starts[1:], len(self.parent_S)]
        return [end - start for start, end in zip(starts, ends, strict=False)]

    @property
    def tokens(self) -> int:
        """Tokens that all agents sampled."""
        return sum(node.tokens for node in self.nodes_S)

    def rows(
        self, agent: int, weight_T: Sequence[float], number_C: Sequence[int] | None = None
    ) -> list[Row]:
        """For each state the agent's row: its completions, weighted by the turn's ``weight_T``
        and numbered ``number_C`` (None: as their joint actions)."""
        number_C = number_C or range(len(self.reward_C))
        rows = []
        for node, actions in zip(self.nodes_S, self.actions_S, strict=True):
            turn = node.agents_N[agent]
            ids = tuple(completion.token_ids for completion in turn.completions_G)
            weights = (weight_T[node.turn - 1],) * len(ids)
            rows.append(Row(turn.prompt_ids, ids, weights, tuple(number_C[c] for c in actions)))
        return rows


def chains_of(trees: Sequence[Tree]) -> Chains:
    """Number the states and joint actions of trees that are bundles of chains."""
    nodes: list[Node] = []
    tasks: list[Task] = []
    paths: list[tuple[int, ...]] = []
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
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, node.parent_action) if parent >= 0 else ())
            nodes.append(node)
            tasks.append(tree.task)
            parents.append(parent)
            actions.append(numbers)
    state = tuple(s for s, numbers in enumerate(actions) for _ in numbers)
    rewards = tuple(reward for node in nodes for reward in node.rewards_K)
    return Chains(
        tuple(nodes), tuple(tasks), tuple(paths), tuple(parents), tuple(actions), state, rewards,
        tuple(tuple(chain) for chain in chains),
    )  # fmt: skip


class PerToken:
    """A number for each token of each completion, found again however rows are batched."""

    def __init__(self) -> None:
        self.of_completion: dict[int, torch.Tensor] = {}

    def put(self, batch: TokenBatch, value_A: torch.Tensor) -> None:
        completion_A = batch.completion_RL[batch.action_mask_RL]
        numbers, counts = torch.unique_consecutive(completion_A, return_counts=True)
        parts = value_A.detach().split(counts.tolist())
        self.of_completion.update(zip(numbers.tolist(), parts, strict=True))

    def get(self, batch: TokenBatch) -> torch.Tensor:
        """(A,), in the batch's order of actions."""
        completion_A = batch.completion_RL[batch.action_mask_RL]
        numbers = torch.unique_consecutive(completion_A)
        return torch.cat([self.of_completion[number] for number in numbers.tolist()])

    def flat(self) -> torch.Tensor:
        """All of them, by the completions' numbers."""
        parts = [self.of_completion[number] for number in sorted(self.of_completion)]
        return torch.cat(parts) if parts else torch.zeros(0)

    def like(self, flat: torch.Tensor) -> PerToken:
        """Other numbers for the same tokens, in the order of ``flat()``."""
        other, numbers = PerToken(), sorted(self.of_completion)
        parts = flat.split([len(self.of_completion[number]) for number in numbers])
        other.of_completion = dict(zip(numbers, parts, strict=True))
        return other


def token_advantages(
    chains: Chains,
    value: PerToken,
    penalty: PerToken | None,
    *,
    gamma_token: float,
    discount: float,
    gae_lambda: float,
) -> tuple[PerToken, PerToken]:
    """GAE over an agent's tokens along each chain; advantages, and returns A + V.

    A turn's reward comes with its last token; ``penalty`` is taken off at every token. γ is
    ``gamma_token`` within a turn and ``discount``, once, between a turn's last token and the next
    turn's first.
    """
    advantages, returns = PerToken(), PerToken()
    for chain in chains.chains:
        values = [value.of_completion[c] for c in chain]
        lengths = [len(part) for part in values]
        values_L = torch.cat(values)
        rewards_L = torch.zeros_like(values_L)
        if penalty is not None:
            rewards_L -= torch.cat([penalty.of_completion[c] for c in chain])
        discounts_L = torch.full_like(values_L, gamma_token)
        last = -1
        for c, length in zip(chain, lengths, strict=True):
            last += length
            rewards_L[last] += chains.reward_C[c]
            discounts_L[last] = discount
        advantages_L = gae(rewards_L, values_L, discounts_L, gae_lambda)
        advantages.of_completion.update(zip(chain, advantages_L.split(lengths), strict=True))
        returns_L = advantages_L + values_L
        returns.of_completion.update(zip(chain, returns_L.split(lengths), strict=True))
    return advantages, returns


def turn_advantages(
    chains: Chains, value_S: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over turns along each chain; advantages and returns A + V of joint actions, (C,) each."""
    advantages_C = value_S.new_zeros(len(chains.reward_C))
    values_C = value_S[torch.tensor(chains.state_C)]
    for chain in chains.chains:
        index = torch.tensor(chain)
        rewards_T = values_C.new_tensor([chains.reward_C[c] for c in chain])
        discounts_T = torch.full_like(rewards_T, discount)
        advantages_C[index] = gae(rewards_T, values_C[index], discounts_T, gae_lambda)
    return advantages_C, advantages_C + values_C


def standardized(values: torch.Tensor) -> torch.Tensor:
    """(x − mean) / (standard deviation + 1e-8), over all processes' values."""
    count, mean, deviation = moments(values)
    return (values - mean) / (deviation + 1e-8) if count else values


def moments(values: torch.Tensor) -> tuple[int, float, float]:
    """Count, mean and standard deviation over all processes' values."""
    sums = distributed.totals({"count": len(values), "sum": float(values.double().sum())})
    count = int(sums["count"])
    if count == 0:
        return 0, math.nan, math.nan
    mean = sums["sum"] / count
    squares = distributed.total(float(((values.double() - mean) ** 2).sum()))
    return count, mean, math.sqrt(squares / count)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 − Var(returns − values) / Var(returns); not a number where all returns are equal."""
    _, _, error = moments(returns - values)
    _, _, whole = moments(returns)
    return 1 - (error / whole) ** 2 if whole > 0 else math.nan


def minibatches(states_B: Sequence[int], size: int | None, key: tuple) -> list[list[int]]:
    """A partition of this process's states in an order that depends on the key alone.

    ``states_B``: states of each of its trees. ``size``: states in a minibatch over all processes
    at most, as in ``like_parts``; None: all of them. Every process gets its part of the minibatches
    that one process alone would make.
    """
    places, total = distributed.positions(states_B)
    own = {place: state for state, place in enumerate(places)}
    shuffled = order((*key, 0), total)
    return [
        [own[shuffled[i]] for i in part if shuffled[i] in own] for part in like_parts(total, size)
    ]


@dataclass(frozen=True, slots=True)
class Pass:
    """One epoch over a step's states."""

    number: int  # 1-based
    progress: float  # of the run, before the pass
    minibatches: list[tuple[list[int], float]]  # states, and the run's progress before the update


def passes(
    states_B: Sequence[int], size: int | None, epochs: int, key: tuple, span: Span
) -> Iterator[Pass]:
    """The epochs of a step, each with ``minibatches`` of its own. Epochs that ``target_kl`` leaves
    out take their part of the schedule with them."""
    for epoch in range(epochs):
        chosen = minibatches(states_B, size, (*key, epoch))
        first, count = epoch * len(chosen), epochs * len(chosen)
        yield Pass(
            epoch + 1,
            span.at(epoch, epochs),
            [(states, span.at(first + m, count)) for m, states in enumerate(chosen)],
        )


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest over all processes' values; (0, 0) where there are none."""
    own = values.detach().flatten().tolist()
    parts = distributed.everyone((min(own), max(own)) if own else ())
    ends = [end for part in parts for end in part]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


@dataclass
class Stats:
    """Sums over the action tokens of clipped updates, for the log."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ratio_max: float = 0.0

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.sums[name] += float(value.detach().sum())

    def absorb(self, other: Stats) -> None:
        for name, value in other.sums.items():
            self.sums[name] += value
        self.ratio_max = max(self.ratio_max, other.ratio_max)

    def means(self) -> dict[str, float]:
        """Every sum over all processes' tokens; ``ratio_max`` among them."""
        parts = distributed.everyone((dict(self.sums), self.ratio_max))
        names = sorted({name for sums, _ in parts for name in sums} - {"tokens"})
        tokens = max(1.0, sum(sums.get("tokens", 0.0) for sums, _ in parts))
        means = {name: sum(sums.get(name, 0.0) for sums, _ in parts) / tokens for name in names}
        return means | {"ratio_max": max(ratio for _, ratio in parts)}


def surrogate(
    logprob_A: torch.Tensor,
    old_A: torch.Tensor,
    advantage_A: torch.Tensor,
    clip_range: float,
    stats: Stats,
) -> torch.Tensor:
    """PPO's clipped surrogate, negated, for each token; what the log wants goes to ``stats``."""
    loss_A = clipped_policy(logprob_A, old_A, advantage_A, clip_range)
    with torch.no_grad():
        ratio_A = (logprob_A - old_A).exp()
        stats.add(
            tokens=torch.ones_like(ratio_A),
            policy_loss=loss_A,
            clip_fraction=((ratio_A - 1).abs() > clip_range).float(),
            approx_kl=k3_kl(old_A, logprob_A),  # samples are the old policy's: KL(old ‖ new)
        )
        if len(ratio_A):
            stats.ratio_max = max(stats.ratio_max, float(ratio_A.max()))
    return loss_A
