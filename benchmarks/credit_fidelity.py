"""The fidelity of each algorithm's credit, in a game of shards whose exact credit is known.

    python benchmarks/credit_fidelity.py [--holders 2 4 8] [--trees 100] [--honesty 0 0.5]

N holders hold different numbers from 1 to 9, and each writes a digit. The judge is a part of the
reward: it names the holder of the largest written digit, of equal ones the first, and the team gets
1 where that holder has the largest number. A holder's policy writes its own number with probability
``--honesty``, and with the rest each digit alike. Trees come from the rollout that trains and
advantages from the functions that train. Critics are exact: the mean reward given what they read.

Columns, over all agents and joint actions of all trees:

- joint actions: scored for one tree.
- D, Shapley, A: rank correlation of the advantages with three exact quantities of
  ``benchmarks/exact_worth.py``. D and Shapley belong to one joint action, A to a
  completion whatever its partners do.
- cosine: between an agent's gradient from one tree and its exact gradient on that task, mean.

A completion that is in several joint actions has one advantage. "each joint action" reads the same
update as credit of a joint action: its return less the mean return of those that differ in the
agent's own completion alone. The mean over a completion's joint actions is its advantage, so this
changes D and Shapley and leaves the gradient as it is.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.exact_worth import Worth, rank_correlation, worth
from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.decisions import decisions_of
from comlrl.credit.returns import completion_returns, counterfactuals, joint_returns
from comlrl.keyed import uniforms
from comlrl.loggers.tables import table
from comlrl.rollout.grow import Rollout
from comlrl.tasks.prompts import Prompts
from comlrl.types import (
    Completion,
    Domain,
    JointAction,
    Message,
    Request,
    Reward,
    Sampling,
    Score,
    Shape,
    Task,
    Tree,
)
from comlrl.update.per_token import PerToken, advantages_of

DIGITS = 9
MOST_ROWS = 4096  # number rows of the game, where there are more
MOST_SCORED = 5000  # joint actions of a tree; settings with more are left out
COMPARED = 64  # joint actions of a tree that are compared with the exact credit
# Advantages of a tree: (node, joint action, agent) → advantage
Credit = dict[tuple[int, int, int], float]


class Judge(Reward):
    """1 where the first of the largest written digits is the largest number's holder's, else 0."""

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        return [Score(self._value(action)) for action in actions]

    @staticmethod
    def _value(action: JointAction) -> float:
        written = [int(text) for text in action.completions_N]
        numbers = action.task.fields["numbers"]
        return float(written.index(max(written)) == numbers.index(max(numbers)))

    def close(self) -> None:
        return


class Holders(Domain):
    """Who holds the largest number? Each agent reads its own."""

    fields, reward = ("number",), Judge

    def task(self, name: str, row: Mapping[str, Any]) -> Task:
        return Task(name, row)

    def roles(self, num_agents: int) -> tuple[str, ...]:
        return tuple(f"holder{i}" for i in range(num_agents))

    def templates(self, num_agents: int) -> tuple[str, ...]:
        return ("{number}",) * num_agents

    def values(self, task: Task, num_agents: int) -> tuple[Mapping[str, str], ...]:
        return tuple({"number": str(number)} for number in task.fields["numbers"])

    def problem(self, task: Task) -> str:
        return str(task.fields["numbers"])

    def handed_on(self, task: Task, agent: int, num_agents: int, written: Sequence[str]) -> str:
        return ""


class TableSampler:
    """The policy of all holders, a table: number → probabilities of the digits."""

    def __init__(self, honesty: float) -> None:
        self.table_DA = (1 - honesty) / DIGITS + honesty * np.eye(DIGITS)

    def encode(self, agent: int, prompt: Sequence[Message]) -> tuple[int, ...]:
        return (int(prompt[0].content.split()[0]),)

    def token_texts(self, agent: int, token_ids: Sequence[int]) -> list[str]:
        return [str(digit) for digit in token_ids]

    def fits(self, agent: int, prompt_ids: Sequence[int], sampling: Sampling) -> bool:
        return True

    def sample(
        self, requests_N: Sequence[Sequence[Request]], sampling: Sampling
    ) -> list[list[tuple[Completion, ...]]]:
        return [[self._completions(request) for request in requests] for requests in requests_N]

    def _completions(self, request: Request) -> tuple[Completion, ...]:
        chances = self.table_DA[request.prompt_ids[0] - 1].cumsum()
        digits = [
            1 + min(DIGITS - 1, int(np.searchsorted(chances, uniforms(key, 1)[0], side="right")))
            for key in request.keys_G
        ]
        return tuple(Completion(str(digit), (digit,), True) for digit in digits)


def expected_reward(numbers: Sequence[int], probability_NA: np.ndarray) -> np.ndarray:
    """Return the exact value: Σ_d P(holder writes d) Π P(those before < d) Π P(those after ≤ d).

    ``probability_NA``: (…, N, digits); the result has shape (…,).
    """
    holder = list(numbers).index(max(numbers))
    most = probability_NA.cumsum(-1)
    less = most - probability_NA
    wins = probability_NA[..., holder, :].copy()
    for other in range(len(numbers)):
        if other != holder:
            wins *= (less if other < holder else most)[..., other, :]
    return wins.sum(-1)


@dataclass
class Game:
    """Tasks with their rows, the policy, and what exact critics say."""

    holders: int
    honesty: float
    rows: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        numbers = range(1, DIGITS + 1)
        if math.perm(DIGITS, self.holders) <= MOST_ROWS:
            self.rows = list(itertools.permutations(numbers, self.holders))
        else:
            drawn = random.Random(0)
            self.rows = [tuple(drawn.sample(numbers, self.holders)) for _ in range(MOST_ROWS)]
        self.sampler = TableSampler(self.honesty)
        self.value = {row: float(self.expected(row)(self.policies(row))) for row in self.rows}
        seen: dict[tuple[int, int], list[float]] = {}
        for row, value in self.value.items():
            for place in enumerate(row):
                seen.setdefault(place, []).append(value)
        self.value_of_own = {place: statistics.fmean(values) for place, values in seen.items()}

    def policies(self, row: Sequence[int]) -> np.ndarray:
        """Return the policies, shape (N, digits)."""
        return self.sampler.table_DA[[number - 1 for number in row]]

    def expected(self, row: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
        return partial(expected_reward, row)

    def grow(self, shape: Shape, trees: int) -> list[Tree]:
        drawn = random.Random(1)
        tasks = [Task(str(i), {"numbers": drawn.choice(self.rows)}) for i in range(trees)]
        rollout = Rollout(self.sampler, Judge(), lambda attempts: [], Prompts(Holders()), seed=0)
        return rollout.grow(tasks, shape, Sampling(1.0, 1), ("train", 1))


# ------------------------------------------------------------------------------- the credit


def sibling_credit(game: Game, tree: Tree, kind: str) -> Credit:
    """Return MAGRPO's advantages, as its trainer computes them."""
    returns, of_completion = joint_returns(tree, 1.0), {}
    for s, node in enumerate(tree.nodes):
        for agent in node.acting:
            returns_G = completion_returns(node, agent, returns[s])
            for g, advantage in enumerate(sibling_advantages(returns_G, kind)):
                of_completion[s, agent, g] = advantage
    compared = {
        (s, agent): {k for group in counterfactuals(node, agent) for k in group}
        for s, node in enumerate(tree.nodes)
        for agent in node.acting
    }
    return {
        (s, k, agent): of_completion[at, agent, g]
        for s, k in scored(tree)
        for agent, (at, g) in enumerate(path(tree, s, k))
        if k in (compared.get((s, agent)) or (k,))  # those that its return is a mean over
    }


def joint_credit(game: Game, tree: Tree, kind: str) -> Credit:
    """Return the same update as credit per joint action: R_k less its counterfactuals' mean."""
    (node,), ((*returns_K,),) = tree.nodes, joint_returns(tree, 1.0)
    return {
        (0, k, agent): returns_K[k] - mean
        for agent in node.acting
        for group in counterfactuals(node, agent)
        for mean in [statistics.fmean(returns_K[j] for j in group)]
        for k in group
    }


def critic_credit(game: Game, tree: Tree, kind: str) -> Credit:
    """Return PPO's generalized advantages with an exact critic of each agent, or of all."""
    decisions, credit = decisions_of([tree]), {}
    row = tree.task.fields["numbers"]
    own_N = [
        game.value[row] if kind == "centralized" else game.value_of_own[place]
        for place in enumerate(row)
    ]
    values = PerToken()
    actions = len(decisions.numbered) // game.holders
    values.of_completion.update(enumerate(torch.tensor(own_N * actions).split(1)))
    for agent in range(game.holders):
        advantages, _ = advantages_of(
            decisions.chains([agent]), decisions.reward, values, None,
            gamma_token=1.0, discount=1.0, gae_lambda=0.95,
        )  # fmt: skip
        for number, advantage in advantages.of_completion.items():
            credit[0, number // game.holders, agent] = float(advantage)
    return credit


def scored(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield the node and number of each scored joint action."""
    for s, node in enumerate(tree.nodes):
        yield from ((s, k) for k in range(len(node.scores_K)))


def path(tree: Tree, s: int, k: int) -> list[tuple[int, int]]:
    """Return, for each agent, the node and index of its completion in a joint action."""
    node = tree.nodes[s]
    places = [(s, g) for g in node.joint_actions_K[k]]
    return (
        places if node.first_agent == 0 else [*path(tree, node.parent, node.parent_action), *places]
    )


# --------------------------------------------------------------------------- the comparison


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table."""

    name: str
    shape: Callable[[int], Shape]  # of N holders
    credit: Callable[[Game, Tree, str], Credit] = sibling_credit
    kind: str = "mean"


def simultaneous(mode: Any, generations: int) -> Callable[[int], Shape]:
    return lambda holders: Shape(holders, 1, generations, joint_mode=mode)


def sequential(first: int, later: int) -> Callable[[int], Shape]:
    return lambda holders: Shape(
        holders, 1, first, turn_order="sequential", num_generations_sequential=later
    )


SETTINGS = [
    Setting("align, G = 4", simultaneous("align", 4)),
    Setting("align, rloo, G = 4", simultaneous("align", 4), kind="rloo"),
    Setting("align, G = 64", simultaneous("align", 64)),
    Setting("align, G = 232", simultaneous("align", 232)),
    *(
        Setting(f"{mode}, G = {count}{'' if credit is sibling_credit else ', each joint action'}",
                simultaneous(mode, count), credit)
        for mode, counts_ in (("cross", (2, 4, 8)), ("counterfactual", (2, 4, 8, 16)))
        for count in counts_
        for credit in (sibling_credit, joint_credit)
    ),
    Setting("sequential, G = 4, then 2", sequential(4, 2)),
    Setting("IPPO, exact critics, G = 64", simultaneous("align", 64), critic_credit, "independent"),
    Setting("MAPPO, exact critic, G = 64", simultaneous("align", 64), critic_credit, "centralized"),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    scored: float  # joint actions of a tree
    difference: float
    shapley: float
    advantage: float
    cosine: float


def fidelity(game: Game, setting: Setting, trees: int) -> Fidelity:
    """Return rank correlations over this many trees, and the mean cosine."""
    pairs: list[tuple[float, ...]] = []
    cosines: list[float] = []
    grown, drawn = game.grow(setting.shape(game.holders), trees), random.Random(2)
    for tree in grown:
        credit = setting.credit(game, tree, setting.kind)
        actions = sorted({(s, k) for s, k, _ in credit})
        for s, k in drawn.sample(actions, min(COMPARED, len(actions))):
            exact = exact_worth(game, tree, s, k)
            for agent in range(game.holders):
                if (estimate := credit.get((s, k, agent))) is not None:
                    exact_values = (exact.difference, exact.shapley, exact.advantage)
                    pairs.append((estimate, *(float(part[agent]) for part in exact_values)))
        cosines += gradient_cosines(game, tree, credit)
    estimate_C, *exact_C = zip(*pairs, strict=True)
    difference, shapley, advantage = (rank_correlation(estimate_C, each) for each in exact_C)
    count = statistics.fmean(sum(1 for _ in scored(tree)) for tree in grown)
    return Fidelity(
        scored=count,
        difference=difference,
        shapley=shapley,
        advantage=advantage,
        cosine=statistics.fmean(cosines),
    )


def digits(tree: Tree, s: int, k: int) -> list[int]:
    """Return what the agents wrote, 0-based."""
    return [completion.token_ids[0] - 1 for _, completion in tree.team(s, k)]


def exact_worth(game: Game, tree: Tree, s: int, k: int) -> Worth:
    row = tree.task.fields["numbers"]
    return worth(digits(tree, s, k), game.policies(row), game.expected(row))


def gradient_cosines(game: Game, tree: Tree, credit: Credit) -> Iterator[float]:
    """Yield the cosine of each agent whose exact gradient is nonzero, for its row's logits."""
    row = tree.task.fields["numbers"]
    policies, expected = game.policies(row), game.expected(row)
    weight_NA = np.zeros_like(policies)
    written = {(s, k): digits(tree, s, k) for s, k in scored(tree)}
    for (s, k, agent), advantage in credit.items():
        weight_NA[agent, written[s, k][agent]] += advantage
    for agent, chance_A in enumerate(policies):
        answers = np.repeat(policies[None], DIGITS, 0)
        answers[:, agent] = np.eye(DIGITS)
        value_A = expected(answers)
        exact = chance_A * (value_A - chance_A @ value_A)
        estimate = weight_NA[agent] - chance_A * weight_NA[agent].sum()
        norms = np.linalg.norm(exact) * np.linalg.norm(estimate)
        if np.linalg.norm(exact) > 1e-9:
            yield float(exact @ estimate / norms) if norms > 1e-12 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--holders", type=int, nargs="+", default=[2, 4, 8], choices=range(2, 9))
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--honesty", type=float, nargs="+", default=[0.0, 0.5])
    options = parser.parse_args()
    head = ["credit", "joint actions", "D", "Shapley", "A", "cosine"]
    for honesty, holders in itertools.product(options.honesty, options.holders):
        game, body = Game(holders, honesty), []
        for setting in SETTINGS:
            shape = setting.shape(holders)
            count = math.prod(
                shape.joint_actions(len(stage), shape.generations(stage.start))
                for stage in shape.stages
            )
            if count > MOST_SCORED or (holders == 2 and shape.joint_mode == "counterfactual"):
                continue  # too many; or the same as cross
            measured = fidelity(game, setting, options.trees)
            numbers = (measured.difference, measured.shapley, measured.advantage, measured.cosine)
            body.append([setting.name, round(measured.scored), *(f"{n:.2f}" for n in numbers)])
            print(*body[-1], sep="\t", file=sys.stderr, flush=True)
        print(f"\n{holders} holders, honesty {honesty:g}\n\n{table(head, body)}")


if __name__ == "__main__":
    main()
