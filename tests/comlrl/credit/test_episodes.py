"""Credit of episodes: returns by hand, rows by hand, and the exact gradient by enumeration."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch

from comlrl.credit.advantages import sibling_advantages
from comlrl.credit.decisions import decisions_of
from comlrl.credit.returns import return_to_go
from comlrl.types import (
    AgentReward,
    Call,
    Completion,
    Episode,
    EpisodeGroup,
    Row,
    Sampling,
    Score,
    Shape,
)
from comlrl.update.losses import policy_gradient
from tests.support.fakes import FakeSampler, task
from tests.support.played import rollout

TASK = task("game")


def call(agent: int, number: int, prompt=(1,), ids=(5,)) -> Call:
    return Call(
        agent=agent,
        number=number,
        prompt=(),
        prompt_ids=tuple(prompt),
        completion=Completion("", tuple(ids), True),
    )


def episode(calls, *paid_N) -> Episode:
    return Episode(
        calls=tuple(calls),
        score=Score(0.0),
        reward=0.0,
        paid_N=tuple(tuple(AgentReward(*p) for p in own) for own in paid_N),
    )


def group(*episodes: Episode, greedy: Episode | None = None) -> EpisodeGroup:
    return EpisodeGroup(TASK, ("a", "b"), episodes, greedy)


def call_advantages(
    group: EpisodeGroup, agent: int, kind: str, *, discount: float
) -> list[list[float]]:
    """For each episode, the advantage of each of the agent's calls."""
    found: list[list[float]] = [[] for _ in group.episodes_G]
    for decision in decisions_of([group], discount).numbered:
        if decision.agent == agent:
            advantages = sibling_advantages(
                decision.returns_G, kind, greedy_return=decision.greedy_return
            )
            found[decision.place].append(advantages[decision.place])
    return found


LONG = episode(
    [call(0, 0), call(1, 0), call(0, 1), call(0, 2)],
    [(0, 100.0), (1, 4.0), (2, 8.0), (3, 16.0)],  # the first before any call: for none of them
    [(1, 16.0)],
)
SHORT = episode([call(0, 0)], [(1, 2.0)], [(0, 2.0)])


def test_returns_to_go_by_hand():
    # γ = 1/2 for each of its calls; the final 16 comes with the third.
    assert [return_to_go(LONG, 0, j, 0.5) for j in (1, 2, 3, 4)] == [12.0, 16.0, 16.0, 16.0]
    assert [return_to_go(LONG, 0, j, 1.0) for j in (1, 2, 3)] == [28.0, 24.0, 16.0]
    assert return_to_go(LONG, 1, 1, 0.5) == 16.0
    # An agent that was not called, and calls that were not made: the final reward alone.
    assert [return_to_go(SHORT, 1, j, 0.5) for j in (1, 2)] == [2.0, 2.0]


def test_advantages_compare_like_calls_of_all_episodes():
    found = call_advantages(group(LONG, SHORT), 0, "mean", discount=0.5)
    assert found == [[5.0, 7.0, 7.0], [-5.0]]
    assert call_advantages(group(LONG, SHORT), 1, "rloo", discount=0.5) == [[14.0], []]
    compared = group(LONG, SHORT, greedy=LONG)
    assert call_advantages(compared, 1, "greedy", discount=0.5) == [[0.0], []]


def test_prompts_that_continue_another_share_its_row():
    first, second = call(0, 0, (1, 2), (3, 9)), call(0, 1, (1, 2, 3, 4), (7,))
    other = call(0, 0, (8,), (9,))
    end: list = [(2, 1.0)], [(0, 1.0)]
    played = group(episode([first, second], *end), episode([other], *end))
    assert decisions_of([played]).packed(range(3), [0.5]) == [
        Row((1, 2), ((3, 9), (3, 4, 7)), (0.5, 0.5), (0, 1), support=(), contexts=(0, 2)),
        Row((8,), ((9,),), (0.5,), (2,)),
    ]


# The game, on a vocabulary of 7: the first agent writes a token. With token 6 that is all; else the
# second reads it and writes one too. The second is paid on its own, and in the middle.
SIZE, LAST = 7, 6


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((SIZE,), (SIZE, SIZE))
    return tuple(  # type: ignore[return-value]
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )


def payoff(first: int, second: int | None) -> tuple[float, float, float]:
    """Of the first agent, of the second at the end, and of the second in the middle."""
    if second is None:
        return 2.0, 3.0, 0.0
    return float((first * second) % 5), float((first + 2 * second) % 4), 0.5 * second


async def game(task, agents):
    first = (await agents["a"]("go")).token_ids[0]
    if first == LAST:
        own, others, _ = payoff(first, None)
        return {"a": own, "b": others}
    second = (await agents["b"](str(first))).token_ids[0]
    own, others, middle = payoff(first, second)
    await agents.reward("b", middle)
    return {"a": own, "b": others}


class Scripted(FakeSampler):
    """Episode g writes the g-th of all pairs of tokens."""

    def completion(self, key, sampling):
        *_, agent, g = key
        return Completion("", ((g // SIZE, g % SIZE)[agent],), True)


def outcomes() -> dict[tuple[int, int | None], Episode]:
    """Every episode that can be played, by what was written in it."""
    player = rollout(game, sampler=Scripted(), names=("a", "b"))
    (played,) = player.grow([TASK], Shape(2, 1, SIZE * SIZE), Sampling(1.0, 1), ("train", 1))
    found = {}
    for each in played.episodes_G:
        tokens = [c.completion.token_ids[0] for c in each.calls]
        found[tokens[0], tokens[1] if len(tokens) > 1 else None] = each
    assert len(found) == LAST * SIZE + 1
    return found


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize(("kind", "share"), [("raw", 1.0), ("rloo", 1.0), ("mean", 0.5)])
def test_the_expected_gradient_is_that_of_each_agents_return(agent, kind, share):
    """By enumeration of all groups of G = 2. The mean as a baseline leaves (G − 1) / G."""
    table_N = tables()
    first, second = (table.log_softmax(-1) for table in table_N)
    episodes = outcomes()
    logprob = {
        pair: first[pair[0]] + (0.0 if pair[1] is None else second[pair[0], pair[1]])
        for pair in episodes
    }
    value = sum(
        logprob[a, b].exp() * (payoff(a, b)[agent] + (payoff(a, b)[2] if agent else 0.0))
        for a, b in episodes
    )
    coefficient: defaultdict[tuple[int, ...], float] = defaultdict(float)  # of each log π
    for one, other in itertools.product(episodes, repeat=2):
        both = group(episodes[one], episodes[other])
        probability = float((logprob[one] + logprob[other]).detach().exp())
        advantages = call_advantages(both, agent, kind, discount=1.0)
        for pair, own in zip((one, other), advantages, strict=True):
            for advantage in own:
                place = pair[:1] if agent == 0 else pair
                coefficient[place] += probability * advantage / 2
    table = table_N[agent].log_softmax(-1)
    places = list(coefficient)
    loss = policy_gradient(
        torch.stack([table[place] for place in places]),
        torch.tensor([coefficient[place] for place in places], dtype=torch.float64),
    )
    (found,) = torch.autograd.grad(loss, table_N[agent], retain_graph=True)
    (exact,) = torch.autograd.grad(value, table_N[agent])
    assert exact.abs().max() > 0.05
    torch.testing.assert_close(-found, share * exact, rtol=0, atol=1e-9)
