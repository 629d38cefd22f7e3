"""A reward for each agent: returns, gradients by enumeration, metrics, and who refuses it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.decisions import decisions_of
from comlrl.credit.returns import completion_returns, joint_returns, joint_returns_of_agents
from comlrl.errors import UserError
from comlrl.evaluation.contributions import summary
from comlrl.evaluation.estimates import task_rows
from comlrl.evaluation.metrics import measures, tree_metrics
from comlrl.loggers.samples import episode
from comlrl.rewards.code.domain import CODE
from comlrl.rollout.grow import Rollout
from comlrl.types import AgentTurn, Completion, Score, Shape, Task, Tree
from comlrl.update.losses import policy_gradient
from tests.support.fakes import (
    PROMPTS,
    SAMPLING,
    SEED,
    FakeReward,
    FakeSampler,
    FakeTransition,
    parts,
    task,
)
from tests.support.plain_chains import chains_of
from tests.support.runs import resolved
from tests.support.trees import node

# The prisoner's dilemma: what each agent is paid for (first's choice, second's choice).
PAYOFF = torch.tensor([[[3.0, 0.0], [5.0, 1.0]], [[3.0, 5.0], [0.0, 1.0]]], dtype=torch.float64)
GENERATIONS = 2


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        for logits in ([0.3, -0.2], [-0.6, 0.4])
    )


def sampled(mode: str, tables: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[Tree, float]]:
    """Every tree of one turn, with its probability."""
    probabilities = [table.detach().softmax(-1) for table in tables]
    joint = tuple(zip(range(GENERATIONS), range(GENERATIONS), strict=True))
    if mode == "cross":
        joint = tuple(itertools.product(range(GENERATIONS), repeat=2))
    for choices in itertools.product(range(2), repeat=2 * GENERATIONS):
        own = (choices[:GENERATIONS], choices[GENERATIONS:])
        turns = [
            AgentTurn((), (0,), tuple(Completion("", (a,), True) for a in chosen)) for chosen in own
        ]
        paid = tuple(
            tuple(float(PAYOFF[i, own[0][g], own[1][h]]) for i in range(2)) for g, h in joint
        )
        scores = [Score(sum(each) / 2, by_agent=each) for each in paid]
        root = node(turns, scores, joint, own_rewards_KN=paid)
        weight = float(
            probabilities[0][list(own[0])].prod() * probabilities[1][list(own[1])].prod()
        )
        yield Tree(Task("dilemma"), (root,), mode, None), weight


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("mode", ["align", "cross"])
@pytest.mark.parametrize(
    ("kind", "share"), [("raw", 1.0), ("rloo", 1.0), ("greedy", 1.0), ("mean", 0.5)]
)
def test_the_expected_gradient_is_that_of_the_agents_own_reward(kind, share, mode, agent):
    """The mean as a baseline leaves (G − 1) / G of it, as with a shared reward."""
    tables = policies()
    total = torch.zeros((), dtype=torch.float64)
    for tree, probability in sampled(mode, tables):
        (root,), (returns_K,) = tree.nodes, joint_returns_of_agents(tree, 0.5)[agent]
        own = completion_returns(root, agent, returns_K)
        advantages = sibling_advantages(own, kind, greedy_return=2.5)
        weight = torch.tensor(advantages, dtype=torch.float64) / GENERATIONS
        chosen = [c.token_ids[0] for c in root.agents_N[agent].completions_G]
        logprob = tables[agent].log_softmax(-1)[chosen]
        total = total + probability * policy_gradient(logprob, weight)
    (found,) = torch.autograd.grad(total, tables[agent])
    first, second = (table.softmax(-1) for table in tables)
    (exact,) = torch.autograd.grad(first @ PAYOFF[agent] @ second, tables[agent])
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(-found, share * exact, rtol=0, atol=1e-9)


class OwnReward(FakeReward):
    """Agent i's is a function of the branch, its completion and i."""

    by_agent = True

    def score(self, actions):
        scores = []
        for action in actions:
            own = tuple(
                float(1 + sum(path) * 2 + g * (i + 1) - 3 * i)
                for i, (_, path, _, g) in enumerate(map(parts, action.completions_N))
            )
            scores.append(Score(sum(own) / len(own), by_agent=own))
        return scores


SHAPES = {
    "align": Shape(2, 3, 2),
    "cross": Shape(2, 2, 2, joint_mode="cross"),
    "handed on": Shape(3, 3, 4, handoff="random", handoff_width=2),
    "in order": Shape(3, 2, 2, turn_order="sequential"),
    "early end": Shape(2, 3, 3, early_termination_threshold=6.0),
}


def grown(shape: Shape, own_rewards: bool = True) -> list[Tree]:
    rollout = Rollout(
        FakeSampler(), OwnReward(lambda *_: 0.0), FakeTransition(), PROMPTS, seed=SEED,
        process=lambda reward: 2 * reward - 1, own_rewards=own_rewards,
    )  # fmt: skip
    return rollout.grow([task("A"), task("B")], shape, SAMPLING, ("train", 1))


@pytest.mark.parametrize("name", SHAPES)
def test_returns_are_those_of_a_tree_that_has_the_agents_rewards_alone(name):
    for tree in grown(SHAPES[name]):
        found = joint_returns_of_agents(tree, 0.5)
        for agent, returns in enumerate(found):
            alone = replace(
                tree,
                nodes=tuple(
                    replace(
                        node,
                        rewards_K=tuple(2 * s.by_agent[agent] - 1 for s in node.scores_K),
                        own_rewards_KN=(),
                    )
                    for node in tree.nodes
                ),
            )
            assert returns == joint_returns(alone, 0.5)
        assert found[0] != found[1]
        team = joint_returns(tree, 0.5)  # what all share is the mean
        for node_returns, *own in zip(team, *found, strict=True):
            means = [sum(each) / len(each) for each in zip(*own, strict=True)]
            assert node_returns == pytest.approx(means)


def test_the_mean_is_learned_from_where_that_is_asked_for():
    for tree in grown(SHAPES["align"], own_rewards=False):
        assert all(node.own_rewards_KN == () for node in tree.nodes)
        assert all(score.by_agent is not None for node in tree.nodes for score in node.scores_K)
        first, second = joint_returns_of_agents(tree, 0.5)
        assert first is second


def test_greedy_rollouts_are_paid_agent_by_agent():
    rollout = Rollout(
        FakeSampler(), OwnReward(lambda *_: 0.0), FakeTransition(), PROMPTS, seed=SEED,
        own_rewards=True,
    )  # fmt: skip
    (tree,) = rollout.grow([task()], Shape(2, 2, 2), SAMPLING, ("train", 1), 0.5)
    # Generation 0 at every turn: 1 − 3 i; below the second completions, 2 more.
    assert tree.greedy_SN == ((1.5, -3.0), (1.0, -2.0), (3.0, 0.0))


def test_chains_carry_each_agents_reward():
    trees = grown(replace(SHAPES["align"], later_generations=1))
    decisions = decisions_of(trees)
    for number, of_team in enumerate(chains_of(trees).reward_C):
        own = [decisions.reward(2 * number + agent) for agent in range(2)]
        assert own[0] != own[1] and sum(own) / 2 == of_team


def test_metrics_show_each_agents_beside_the_teams():
    def scored(*own_K, **where):
        turn = AgentTurn((), (1,), (Completion("a", (1,), True),) * len(own_K))
        return node([turn] * 2, [Score(sum(own) / 2, by_agent=own) for own in own_K], **where)

    root = scored((3.0, 1.0), (5.0, 0.0))
    nodes = (root, scored((2.0, 6.0), (0.0, 2.0), turn=2, parent=0, action=0))
    tree = Tree(task(), nodes, "align", "best")
    found = tree_metrics([tree], CODE)
    assert (found["reward_mean"], found["turn_1/reward_mean"]) == (2.5, 2.25)
    assert (found["agent_0/reward_mean"], found["agent_1/reward_mean"]) == (1.0, 4.0)
    assert (found["turn_1/agent_0/reward_mean"], found["turn_1/agent_1/reward_mean"]) == (4.0, 0.5)
    assert not [name for name in measures(found) if "agent" in name]
    assert episode(tree, 1, 0, CODE)["rewards_N"] == [2.0, 6.0]


def test_contributions_tell_whom_an_agent_helps():
    def rows(own):
        turn = AgentTurn((), (1,), (Completion("a", (1,), True),))
        root = node([turn] * 2, [Score(sum(own) / 2, by_agent=own)])
        return task_rows([Tree(task(), (root,), "align", None)], [1])

    paid = {(0, 1): (3.0, 3.0), (0,): (5.0, 0.0), (1,): (0.0, 5.0), (): (1.0, 1.0)}
    found = summary({frozenset(c): rows(own) for c, own in paid.items()}, seed=0)
    assert found["reward_mean"]["difference_rewards"]["0"]["mean"] == 0.5  # 3 − 2.5
    assert found["agent_0/reward_mean"]["difference_rewards"]["0"]["mean"] == 3.0  # 3 − 0
    assert found["agent_1/reward_mean"]["difference_rewards"]["0"]["mean"] == -2.0  # 3 − 5


DILEMMA = """
from comlrl.types import Reward, Score

class Dilemma(Reward):
    by_agent = True

    def score(self, actions):
        own = [tuple(float(len(text)) for text in action.completions_N) for action in actions]
        return [Score(sum(each) / len(each), by_agent=each) for each in own]
"""


def own_rewards(algorithm: str, folder: Path, *given: str) -> bool:
    (folder / "dilemma.py").write_text(DILEMMA)
    (folder / "run.yaml").write_text(f"reward: {{target: 'dilemma:Dilemma'}}\n{algorithm}: {{}}\n")
    return resolved(folder / "run.yaml", *given)[1].own_rewards


@pytest.mark.parametrize("algorithm", ["madpo", "marlhf", "shppo"])
def test_who_compares_by_one_number_refuses_at_the_door(algorithm, tmp_path):
    with pytest.raises(UserError) as refused:
        own_rewards(algorithm, tmp_path)
    line = str(refused.value)
    assert line.startswith(f"reward.by_agent: 'own', which {algorithm} cannot learn from: ")
    assert line.endswith("; set reward.by_agent=mean") and "\n" not in line
    assert not own_rewards(algorithm, tmp_path, "reward.by_agent=mean")


@pytest.mark.parametrize("algorithm", ["magrpo", "grpo", "ppo"])
def test_the_others_learn_from_it(algorithm, tmp_path):
    assert own_rewards(algorithm, tmp_path)
