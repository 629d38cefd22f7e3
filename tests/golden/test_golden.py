"""Our numbers beside those that others have computed from the same inputs (``toy.py``), each by the
program of its name here: ``make_comlrl.py``, ``make_trl.py``, ``make_verl.py``.

Where we differ, a test says by what and why.
"""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comlrl.credit.advantages import gae, sibling_advantages
from comlrl.credit.returns import joint_returns
from comlrl.models.logprobs import action_logprobs
from comlrl.models.pretrained import build_team
from comlrl.models.team import Team
from comlrl.preferences.pairs import select_pairs
from comlrl.processes.statistics import Sums, standardized
from comlrl.types import AgentTurn, Completion, Message, Node, Row, Sampling, Score, Tree
from comlrl.update.losses import clipped_value, joint_dpo
from comlrl.update.per_token import advantages_of
from comlrl.update.policy_update import PolicyUpdate
from tests.golden import toy
from tests.support.agent_returns import agent_returns
from tests.support.fakes import task
from tests.support.gradients import fast, flat
from tests.support.tiny_models import config, tokenizer
from tests.support.turn_credit import by_number

COMLRL, TRL, VERL = (
    json.loads((Path(__file__).parent / f"{name}.json").read_text())
    for name in ("comlrl", "trl", "verl")
)
G = 2  # generations of an agent in the trees
close = partial(pytest.approx, rel=1e-5, abs=5e-5)  # some of theirs are float32


def team(folder: Path, *numbers: int) -> Team:
    """Agents that are these toys, all their weights trained."""
    for number in numbers:
        toy.model(number).save_pretrained(folder / str(number))
        tokenizer().save_pretrained(folder / str(number))
    return build_team(
        config(
            num_agents=len(numbers), agents=[str(folder / str(n)) for n in numbers],
            lora__enabled=False, agent_model__torch_dtype="float64",
        ),
        device="cpu",
    )  # fmt: skip


def turn(node: int, agent: int, count: int, less: int = 0) -> AgentTurn:
    """What an agent says there; ``less``: tokens that each completion lacks at its end."""
    tokens_G = [toy.completion(node, agent, g) for g in range(count)]
    ids = [tuple(tokens[: len(tokens) - less]) for tokens in tokens_G]
    completions = tuple(Completion("c", own, True) for own in ids)
    return AgentTurn((Message("user", "p"),), tuple(toy.prompt(node)), completions)


def tree(mode: str, less: int = 0) -> Tree:
    """Two turns of two agents: every joint action is continued."""
    actions = tuple(itertools.product(range(G), repeat=2))
    if mode == "align":
        actions = tuple((g, g) for g in range(G))
    nodes = []
    for n in range(1 + len(actions)):
        rewards = tuple(toy.reward(n, action) for action in actions)
        agents = tuple(turn(n, agent, G, less) for agent in range(2))
        turn_of, parent, action = (2, 0, n - 1) if n else (1, -1, -1)
        nodes.append(
            Node(
                turn=turn_of,
                parent=parent,
                parent_action=action,
                agents_N=agents,
                joint_actions_K=actions,
                scores_K=tuple(map(Score, rewards)),
                rewards_K=rewards,
            )
        )
    return Tree(task(), tuple(nodes), mode, None)  # type: ignore[arg-type]


def returns_NS(mode: str) -> list[list[list[float]]]:
    """Of each agent at each node, with γ = 1: theirs adds up rewards, whatever discount says."""
    grown = tree(mode)
    of_nodes = [
        agent_returns(node, joint)
        for node, joint in zip(grown.nodes, joint_returns(grown, 1.0), strict=True)
    ]
    return [[node[agent] for node in of_nodes] for agent in range(2)]


def theirs_NS(mode: str) -> list[list[list[float]]]:
    return [[sample["returns"] for sample in agent] for agent in COMLRL[mode]["returns"]]


def test_returns_of_align_are_comlrls():
    for ours, theirs in zip(returns_NS("align"), theirs_NS("align"), strict=True):
        assert ours == [close(values) for values in theirs]


def test_returns_of_cross_are_comlrls_divided_by_the_joint_actions_that_share_a_completion():
    """Theirs is the sum over them, ours the mean: G^(N − 1) = 2 times as much."""
    for ours, theirs in zip(returns_NS("cross"), theirs_NS("cross"), strict=True):
        assert [[2 * r for r in values] for values in ours] == [close(v) for v in theirs]


def test_crossed_of_comlrl_credits_combinations():
    """Spelled so it gives every agent's g-th completion the return of the g-th of all joint
    actions; nothing here corresponds to that."""
    joint = joint_returns(tree("cross"), 1.0)
    assert theirs_NS("crossed") == [[close(values) for values in joint]] * 2
    assert len(joint[0]) == 4 > G


@pytest.mark.parametrize(("mode", "factor"), [("align", 1), ("cross", 2)])
@pytest.mark.parametrize("less", [0, 1])
def test_the_gradient_of_magrpo_is_comlrls(tmp_path, mode, factor, less):
    """Theirs leaves the last token of a completion out: it is ours of completions without it
    (``less``), and ours is theirs of completions that have one more. Theirs makes an update for
    each turn, a mean over its nodes; ours one, a mean over all nodes. cross: ``factor``, see above.
    """
    agents = team(tmp_path, 0, 1)
    section = config(num_turns=2, num_generations=G, joint_mode=mode, discount=1.0).section
    grown = tree(mode, less)
    ours_N = fast(agents, section, [grown], sampling=Sampling(1.0, 8))
    later = len(grown.nodes) - 1
    theirs_N = COMLRL[mode if less else f"{mode}, a token more"]["gradients"]
    for (ours,), (first, second) in zip(ours_N, theirs_N, strict=True):
        mean = [(a + later * b) / len(grown.nodes) for a, b in zip(first, second, strict=True)]
        assert [factor * x for x in toy.projections([ours])] == close(mean)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_gradient_of_one_policy_is_comlrls_joint_policys(tmp_path, normalize):
    """The team as one policy: GRPO here. This one counts the last token, as ours does."""
    agents = team(tmp_path, 2)
    section = config(num_agents=1, num_generations=3, advantage_normalization=normalize).section
    rewards = tuple(toy.REWARDS[0])
    scores, actions = tuple(map(Score, rewards)), ((0,), (1,), (2,))
    root = Node(
        turn=1,
        parent=-1,
        parent_action=-1,
        agents_N=(turn(0, 0, 3),),
        joint_actions_K=actions,
        scores_K=scores,
        rewards_K=rewards,
    )
    ((ours,),) = fast(
        agents, section, [Tree(task(), (root,), "align", None)], sampling=Sampling(1.0, 8)
    )
    theirs = COMLRL["joint policy, normalized" if normalize else "joint policy"]
    assert toy.projections([ours]) == close(theirs["gradient"])


def advantages(kind: str, **more: Any) -> list[list[float]]:
    greedy = toy.GREEDY if kind == "greedy" else [None] * len(toy.REWARDS)
    return [
        sibling_advantages(rewards, kind, greedy_return=g, **more)
        for rewards, g in zip(toy.REWARDS, greedy, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        *((kind, COMLRL["advantages"][kind]) for kind in ("mean", "rloo", "max", "raw")),
        ("mean", TRL["grpo, not normalized"]),
        ("mean", VERL["grpo, not normalized"]),
        ("rloo", TRL["rloo"]),
        ("rloo", VERL["rloo"]),
        ("greedy", VERL["remax"]),
    ],
)
def test_advantages_are_theirs(kind, theirs):
    assert advantages(kind) == [close(values) for values in theirs]


@pytest.mark.parametrize(("theirs", "epsilon"), [(TRL["grpo"], 1e-4), (VERL["grpo"], 1e-6)])
def test_normalized_advantages_are_theirs_but_for_the_standard_deviation(theirs, epsilon):
    """Theirs is the sample's (G − 1 in the denominator) and has ε added to it; ours, as
    comlrl's, is that of the G siblings."""
    for ours, values, rewards in zip(
        advantages("mean", normalize=True), theirs, toy.REWARDS, strict=True
    ):
        sample = float(torch.tensor(rewards).std())
        factor = math.sqrt((len(rewards) - 1) / len(rewards)) * sample / (sample + epsilon)
        assert [factor * x for x in ours] == close(values)


def test_gae_is_verls():
    rows = zip(toy.TOKEN_REWARDS, toy.VALUES, VERL["gae"]["returns"], toy.LENGTHS, strict=True)
    for rewards, values, theirs, length in rows:
        values_L = torch.tensor(values[:length], dtype=torch.float64)
        discounts = torch.full((length,), toy.GAMMA, dtype=torch.float64)
        ours = gae(torch.tensor(rewards[:length]), values_L, discounts, toy.LAMBDA)
        assert (ours + values_L).tolist() == close(theirs[:length])


def test_standardized_advantages_are_verls_but_for_the_standard_deviation():
    """Theirs has n − 1 of the n = 6 tokens in the denominator, ours n."""
    chains = zip(VERL["gae"]["returns"], toy.VALUES, toy.LENGTHS, strict=True)
    advantage_A = [r - v for rs, vs, n in chains for r, v in zip(rs[:n], vs[:n], strict=True)]
    theirs = [
        x for row, n in zip(VERL["gae"]["whitened"], toy.LENGTHS, strict=True) for x in row[:n]
    ]
    ours = standardized(torch.tensor(advantage_A, dtype=torch.float64))
    assert (math.sqrt(5 / 6) * ours).tolist() == close(theirs)


def test_targets_of_the_actor_critic_are_comlrls():
    """Its temporal difference of one turn is GAE with λ = 0 over turns."""
    values = by_number(torch.tensor(toy.CHAIN["values"]))
    advantage, returns = advantages_of(
        [[0, 1, 2]], lambda turn: toy.CHAIN["rewards"][turn], values, None,
        gamma_token=1.0, discount=toy.CHAIN["discount"], gae_lambda=0.0,
    )  # fmt: skip
    assert advantage.flat().tolist() == close(COMLRL["actor-critic"]["advantages"])
    assert returns.flat().tolist() == close(COMLRL["actor-critic"]["targets"])


def test_the_actors_gradient_is_comlrls(tmp_path):
    """Ours is a mean over the tokens of an update, theirs over its completions: A / C times as
    much, A tokens and C completions."""
    agents = team(tmp_path, 3)
    (agent,) = agents.agents
    rows = [
        Row(tuple(toy.prompt(t)), (tuple(toy.completion(t, 0, 0)),), (1.0,), (t,)) for t in range(3)
    ]
    section = config("ppo").section
    policy = PolicyUpdate(
        section, agents, agent, lambda batch: action_logprobs(agent, batch, 1.0), lambda *_: None
    )  # type: ignore[arg-type]
    policy.credit(by_number(torch.tensor(COMLRL["actor-critic"]["advantages"])), rows)
    found: list[torch.Tensor] = []
    optimizer = SimpleNamespace(
        parameters=agent.parameters(),
        zero=agent.model.zero_grad,
        step=lambda progress: found.append(flat(agent)) or 0.0,
    )
    policy.update(rows, [optimizer], Sums(), 0.0)  # type: ignore[list-item]
    tokens = sum(len(row.completions[0]) for row in rows)
    ours = [tokens / len(rows) * x for x in toy.projections(found)]
    assert ours == close(COMLRL["actor-critic"]["actor"])


@pytest.mark.parametrize(
    ("name", "clip_range"), [("actor-critic", None), ("actor-critic, shared", 0.2)]
)
def test_the_critics_gradient_is_comlrls(name, clip_range):
    """Their loss is 0.6 (its coefficient) times the square, ours half of the square. Their
    separate critic is not clipped. The gradient is that of a bias: the sum of the values' own."""
    golden = COMLRL[name]
    now = torch.tensor(golden["now"], dtype=torch.float64, requires_grad=True)
    old, target = torch.tensor(toy.CHAIN["values"]), torch.tensor(golden["targets"])
    clipped_value(now, old, target, clip_range).mean().backward()
    assert 2 * 0.6 * float(now.grad.sum()) == close(golden["bias"])


def test_all_pairs_are_comlrls():
    for rewards, theirs in zip(toy.CANDIDATES, COMLRL["pairs"]["all"], strict=True):
        pairs, _ = select_pairs(rewards, "all", None, range)
        assert [[p.winner, p.loser] for p in pairs] == theirs


def test_the_largest_gaps_are_comlrls_and_shared_out_otherwise():
    """The same gaps. Of equal ones theirs takes the first, and one winner may have all of them;
    ours those whose candidates were used least."""
    found = []
    for rewards, theirs in zip(toy.CANDIDATES, COMLRL["pairs"]["gap"], strict=True):
        pairs, _ = select_pairs(rewards, "reward_gap", 2, range)
        assert [p.gap for p in pairs] == [
            rewards[winner] - rewards[loser] for winner, loser in theirs
        ]
        found.append(([[p.winner, p.loser] for p in pairs], theirs))
    assert [mine for mine, other in found if mine != other] == [[[0, 2], [1, 3]]]
    assert found[-1][1] == [[0, 2], [0, 3]]


def test_the_loss_of_a_pair_is_comlrls():
    deltas = torch.tensor(toy.DELTAS)
    for agent, theirs in enumerate(COMLRL["preference losses"]):
        own, others = deltas[:, agent], deltas[:, 1 - agent]
        assert joint_dpo(own, others, 0.7).mean().item() == close(theirs)
