"""What MAGRPO and GRPO learn from programs: advantages by hand, exact gradients by enumeration."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from comlrl.rollout.generation import Generator
from comlrl.types import Call, Episode, EpisodeGroup, Sampling, Shape
from comlrl.update.policy_update import PolicyUpdate
from tests.support.fakes import task
from tests.support.gradients import fast, flat
from tests.support.plain import relative
from tests.support.played import playing, rollout
from tests.support.tiny_models import config, team
from tests.support.tiny_trainers import build, share_of_letters

# ----------------------------------------------------------------------------- advantages by hand

# Of each episode of a step, and then of the greedy one: calls of the first and of the second agent,
# what the first is paid after its first call, and what all are paid at the end. With γ = 1/2 the
# first agent's returns from its calls on are 4, 4 in episode 0; 8 (8 too where it does not call) in
# episode 1; −3, −6 in episode 2; 1, 2 in the greedy one. Those of the second are the final rewards.
PLAYED = ((2, 1, 2.0, 4.0), (1, 1, 0.0, 8.0), (2, 0, 0.0, -6.0), (2, 1, 0.0, 2.0))
# By agent, episode and call. The means of the first agent's returns are 3 and 2, of the second's 2.
BY_HAND = {
    "mean": {"000": 1, "001": 2, "010": 5, "020": -6, "021": -8, "100": 2, "110": 6},
    "rloo": {"000": 1.5, "001": 3, "010": 7.5, "020": -9, "021": -12, "100": 3, "110": 9},
    "max": {"000": -4, "001": -4, "010": 0, "020": -11, "021": -14, "100": -4, "110": 0},
    "greedy": {"000": 3, "001": 2, "010": 7, "020": -4, "021": -8, "100": 2, "110": 6},
    "raw": {"000": 4, "001": 4, "010": 8, "020": -3, "021": -6, "100": 4, "110": 8},
}


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("names", [("solo",), ("aux", "main")], ids=["grpo", "magrpo"])
def test_calls_have_the_advantages_that_a_hand_computes(names, kind, tmp_path, monkeypatch):
    """In each of two passes over a step, with a penalty for divergence: it keeps the calls whose
    advantage is 0."""
    numbers, found = itertools.count(), []

    async def play(task, agents):
        g = next(numbers)
        *counts, midway, final = PLAYED[g]
        for i, (name, count) in enumerate(zip(agents, counts, strict=False)):
            for call in range(count):
                await agents[name](f"{i}{g}{call}")
                if (i, call) == (0, 0):
                    await agents.reward(name, midway)
        return final

    def keep(policy, rows, *arguments):
        for row in rows:
            (advantage,) = policy.advantage.of_completion[row.indices[0]].unique().tolist()
            prompt = policy.agent.decode(row.prompt_ids).strip()
            found.append((prompt, pytest.approx(advantage)))
            assert row.weights == (1.0,) and arguments[1] == 3  # G · one task
        return gradients(policy, rows, *arguments)

    gradients = PolicyUpdate.gradients
    monkeypatch.setattr(PolicyUpdate, "gradients", keep)
    trainer = build(
        "grpo" if len(names) == 1 else "magrpo", tmp_path / "run", share_of_letters, count=1,
        max_steps=1, num_generations=3, advantage=kind, discount=0.5, update_epochs=2, kl_coef=0.1,
        learning_rate=1e-2,
    )  # fmt: skip
    playing(trainer, play, names).train()
    by_hand = [pair for pair in BY_HAND[kind].items() if int(pair[0][0]) < len(names)]
    assert sorted(found, key=lambda pair: pair[0]) == sorted([*by_hand, *by_hand])
    assert next(numbers) == 3 + (kind == "greedy")
    (line,) = trainer.loop.log.logger.metrics()
    assert line["kl"] > 0 and line["ratio_max"] > 1
    zeros = [sum(a == 0 for k, a in by_hand if k[0] == str(i)) for i in range(len(names))]
    calls = [sum(k[0] == str(i) for k, _ in by_hand) for i in range(len(names))]
    shares = [zero / count for zero, count in zip(zeros, calls, strict=True)]
    assert line["zero_advantage_share"] == pytest.approx(sum(shares) / len(shares))


# --------------------------------------------------------------------- exact gradients: two calls

FEW = Sampling(1.5, 1, top_k=3, max_support=8)  # a token of each call, one of three


async def solo(task, agents):
    """One agent calls itself; after its likeliest token that is all."""
    first = (await agents["solo"]("go")).token_ids[0]
    await agents.reward("solo", first % 5)
    if first % 2:
        return first % 3
    second = (await agents["solo"](f"{first} ?")).token_ids[0]
    return (first * second) % 7


async def pair(task, agents):
    """The second reads the first; it has its own reward, and one in the middle."""
    first = (await agents["aux"]("go")).token_ids[0]
    if first % 2:
        return {"aux": first % 3, "main": 1}
    second = (await agents["main"](f"{first} ?")).token_ids[0]
    await agents.reward("main", second % 4)
    return {"aux": (first * second) % 7, "main": (first + second) % 5}


def outcomes(agents, play, names) -> list[Episode]:
    """Every episode that can be played, each once, by the built-in sampler."""
    player = rollout(play, sampler=Generator(agents), names=names)
    (group,) = player.grow([task()], Shape(len(names), 1, 400), FEW, ("train", 1))
    return list({tuple(map(_written, e.calls)): e for e in group.episodes_G}.values())


def _written(call: Call) -> int:
    return call.completion.token_ids[0]


def logprob(agent, call: Call) -> torch.Tensor:
    """Of a call's token among the three likeliest, by the model as it is."""
    logits = agent.model(torch.tensor([call.prompt_ids])).logits[0, -1] / FEW.temperature
    least = logits.topk(3).values[-1]
    return logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)[_written(call)]


def exact(agents, episodes, index: int) -> torch.Tensor:
    """The gradient of an agent's expected return Σ P(episode) R(episode) in its weights."""
    with torch.no_grad():
        others = [_logprob_of(agents, episode, lambda i: i != index) for episode in episodes]
    own_agent = agents.agents[index]
    for parameter in own_agent.parameters():
        parameter.grad = None
    with agents.acting(index):
        value = sum(
            (_logprob_of(agents, episode, lambda i: i == index) + other).exp()
            * sum(paid.value for paid in episode.paid_N[index])
            for episode, other in zip(episodes, others, strict=True)
        )
        value.backward()
    return flat(own_agent)


def _logprob_of(agents, episode, whose) -> torch.Tensor:
    """Of the calls by some agents in an episode."""
    total = torch.zeros((), dtype=torch.float64)
    for call in episode.calls:
        if whose(call.agent):
            with agents.acting(call.agent) as agent:
                total = total + logprob(agent, call)
    return total


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "share"), [("raw", 1.0), ("rloo", 1.0), ("mean", 0.5)])
@pytest.mark.parametrize(
    ("algorithm", "play", "names"), [("grpo", solo, ("solo",)), ("magrpo", pair, ("aux", "main"))]
)
def test_the_expected_update_is_the_policy_gradient(algorithm, play, names, kind, share):
    """The trainer's own updates on all groups of two episodes, weighted with their probabilities,
    on a real model. The mean as a baseline leaves (G − 1) / G."""
    keys = {"num_agents": len(names), "num_generations": 2, "advantage": kind, "discount": 1.0}
    section = config(algorithm, top_k=3, **keys).section
    agents = team(algorithm=algorithm, num_agents=len(names))
    episodes = outcomes(agents, play, names)
    calls = Counter(len(episode.calls) for episode in episodes)
    assert calls[1] + calls[2] / 3 == 3 and calls[1] and calls[2]
    with torch.no_grad():
        probability = [float(_logprob_of(agents, e, lambda _: True).exp()) for e in episodes]
    assert sum(probability) == pytest.approx(1, abs=1e-12)
    found = [torch.zeros(()) for _ in names]
    for (e, p), (f, q) in itertools.product(zip(episodes, probability, strict=True), repeat=2):
        group = EpisodeGroup(task(), names, (e, f))
        for i, (gradient,) in enumerate(fast(agents, section, [group], sampling=FEW)):
            found[i] = found[i] + p * q * gradient
    for i in range(len(names)):
        expected = exact(agents, episodes, i)
        assert expected.abs().max() > 1e-3
        assert relative(-found[i], share * expected) < 1e-9
