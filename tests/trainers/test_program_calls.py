"""PPO on the calls of programs: the exact gradient by enumeration, and whole training steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from comlrl.credit.decisions import Decisions, View, decisions_of
from comlrl.models.critics import TeamCritic
from comlrl.types import Completion, Episode, EpisodeGroup, Shape
from comlrl.update.losses import policy_gradient
from comlrl.update.values import PooledReader, StepValues
from tests.support.fakes import SAMPLING, FakeSampler, task
from tests.support.played import conversation, one_by_one, playing, rollout, simultaneous
from tests.support.tiny_trainers import build, own_shares, share_of_letters

# ------------------------------------------------------------------------------ by enumeration

FEATURES, DISCOUNT = 6, 0.5
CHOICES = {(0, 0): 3, (1, 0): 2, (0, 1): 2}  # of (agent, call): how many tokens to choose from
MIDWAY = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-1.0, 3.0]])  # of message and answer
FINAL_A = torch.tensor(
    [[[2.0, 2.0], [-1.0, 3.0]], [[0.0, 0.0], [5.0, 1.0]], [[1.0, 1.0], [0.5, 2]]]
)
FINAL_B = torch.tensor(
    [[[-3.0, -3.0], [1.0, 0.0]], [[2.0, 2.0], [1.0, 4]], [[0.0, 0.0], [3.0, -2]]]
)


async def talk(task, agents):
    """A message, an answer, and, after answer 1, a second message."""
    m = int(await agents["a"]("begin"))
    answer = int(await agents["b"](f"{m}"))
    await agents.reward("a", float(MIDWAY[m, answer]))
    last = int(await agents["a"](f"{m} {answer}")) if answer else 0
    return {"a": float(FINAL_A[m, answer, last]), "b": float(FINAL_B[m, answer, last])}


class Scripted(FakeSampler):
    """Every episode's choices, one episode a script."""

    scripts = tuple(itertools.product(*map(range, CHOICES.values())))

    def completion(self, key, sampling):
        path, agent, g = key[-3:]
        chosen = dict(zip(CHOICES, self.scripts[g], strict=True))[agent, path[0] if path else 0]
        return Completion(str(chosen), (chosen,), True)


def episodes() -> list[Episode]:
    """Every episode that can be played, once."""
    player = rollout(talk, sampler=Scripted(), names=("a", "b"))
    (group,) = player.grow([task()], Shape(2, 1, len(Scripted.scripts)), SAMPLING, ("train", 1))
    return list({chosen(episode): episode for episode in group.episodes_G}.values())


def chosen(episode: Episode) -> tuple[int, ...]:
    return tuple(call.completion.token_ids[0] for call in episode.calls)


def tables() -> dict[tuple[int, int], torch.Tensor]:
    """Logits of each call, by all that was written before it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(0, 0): (3,), (1, 0): (3, 2), (0, 1): (3, 2, 2)}
    return {
        place: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(True)
        for place, shape in shapes.items()
    }


def logprobs(policy: dict[tuple[int, int], torch.Tensor], episode: Episode) -> torch.Tensor:
    written = chosen(episode)
    return torch.stack(
        [
            policy[call.agent, call.number].log_softmax(-1)[written[: at + 1]]
            for at, call in enumerate(episode.calls)
        ]
    )


def views_of(decisions: Decisions, kind: str) -> list[list[View]]:
    """Of the only task's episode. ``all prompts``: those of later calls too."""
    if kind == "all prompts":
        calls = tuple(range(len(decisions.numbered)))
        return [[View((call,), calls) for call in calls]]
    return decisions.views(range(2), kind == "centralized")


def advantages(kind: str, episode: Episode) -> torch.Tensor:
    """Of each call, with λ = 1, by a critic that says anything."""
    decisions = decisions_of([EpisodeGroup(task(), ("a", "b"), (episode,))])
    torch.manual_seed(1)
    critic = TeamCritic(FEATURES, hidden=8, heads=2).double()
    torch.nn.init.normal_(critic.together[-1].weight)
    seen = torch.stack([features(decisions[d].prompt_ids) for d in decisions.prompts])
    section = SimpleNamespace(discount=DISCOUNT, gae_lambda=1.0)
    reader = PooledReader(critic, decisions, seen, views_of(decisions, kind))
    values = StepValues(section, reader)
    found = values.credit(decisions.chains(range(2)), decisions.reward, None)
    return torch.cat([found.of_completion[k] for k in range(len(decisions.numbered))])


def features(ids: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(5**i * t for i, t in enumerate(ids)) % 2**40)
    return torch.randn(FEATURES, generator=generator, dtype=torch.float64)


def expected_gradients(kind: str) -> dict[tuple[int, int], torch.Tensor]:
    """Of −E[Σ Â log π], over all episodes with their probabilities."""
    policy, total = tables(), torch.zeros((), dtype=torch.float64)
    for episode in episodes():
        own = logprobs(policy, episode)
        loss = policy_gradient(own, advantages(kind, episode))
        total = total + float(own.detach().sum().exp()) * loss
    return dict(zip(policy, torch.autograd.grad(total, list(policy.values())), strict=True))


def exact_gradients() -> dict[tuple[int, int], torch.Tensor]:
    """Of the expected return from each call on, that of the call's own agent."""
    policy, value = tables(), dict.fromkeys(CHOICES, 0.0)
    for m, answer, last in [(m, a, n) for m in range(3) for a in (0, 1) for n in range(a + 1)]:
        probability = policy[0, 0].log_softmax(-1)[m].exp()
        probability = probability * policy[1, 0].log_softmax(-1)[m, answer].exp()
        final, factor = float(FINAL_A[m, answer, last]), DISCOUNT if answer else 1.0
        if answer:
            probability = probability * policy[0, 1].log_softmax(-1)[m, answer, last].exp()
            value[0, 1] = value[0, 1] + probability * final
        value[0, 0] = value[0, 0] + probability * (float(MIDWAY[m, answer]) + factor * final)
        value[1, 0] = value[1, 0] + probability * float(FINAL_B[m, answer, last])
    return {
        place: torch.autograd.grad(value[place], table, retain_graph=True)[0]
        for place, table in policy.items()
    }


@pytest.mark.parametrize("kind", ["independent", "centralized"])
def test_the_expected_gradient_is_that_of_each_agents_return(kind):
    exact = exact_gradients()
    for place, found in expected_gradients(kind).items():
        assert exact[place].abs().max() > 0.01
        torch.testing.assert_close(-found, exact[place], rtol=0, atol=1e-9)


def test_a_value_that_reads_later_prompts_takes_the_senders_gradient_away():
    exact, found = exact_gradients(), expected_gradients("all prompts")
    torch.testing.assert_close(-found[0, 1], exact[0, 1], rtol=0, atol=1e-9)  # nothing is later
    assert (-found[0, 0] - exact[0, 0]).abs().max() > 0.01


def test_calls_are_numbered_and_paid_in_their_order():
    (long,) = [episode for episode in episodes() if chosen(episode) == (1, 1, 0)]
    (short,) = [episode for episode in episodes() if chosen(episode) == (2, 0)]
    decisions = decisions_of([EpisodeGroup(task(), ("a", "b"), (long, short))])
    assert decisions.chains([0]) == [[0, 2], [3]] and decisions.chains([1]) == [[1], [4]]
    assert [decisions.reward(n) for n in range(5)] == [4.0, 1.0, 5.0, 0.0, 0.0]
    read = {n: view.read for (views,) in [decisions.views(range(2), True)] for view in views
            for n in view.numbers}  # fmt: skip
    assert read == {0: (0,), 1: (0, 1), 2: (1, 2), 3: (3,), 4: (3, 4)}


# -------------------------------------------------------------------------------- training steps


def weights(trainer) -> list[torch.Tensor]:
    found = [p for agent in trainer.team.agents for p in agent.parameters()]
    return [
        p.detach().clone()
        for p in [*found, *(p for c in trainer.critics.networks for p in c.parameters())]
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "keys",
    [
        {"kl_coef": 0.1, "train_batch_size": 1, "top_k": 20},
        {"granularity": "turn", "kl_coef": 0.1},
        {"shared_policy": True, "kl_in": "loss", "kl_coef": 0.1},
    ],
)
def test_a_simultaneous_turn_as_a_program_is_ippo_to_the_bit(keys, tmp_path):
    found = []
    for number in range(2):
        trainer = build(
            "ppo", tmp_path / str(number), share_of_letters, num_agents=2, max_steps=1, **keys
        )
        if number:
            playing(trainer, simultaneous)
        trainer.train()
        found.append((weights(trainer), trainer.loop.log.logger.metrics()))
    (own, metrics), (others, other_metrics) = found
    assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))
    names = ("policy_loss", "kl", "value_loss", "explained_variance")
    assert [m[n] for m in metrics for n in names] == [m[n] for m in other_metrics for n in names]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "keys",
    [
        {"kl_coef": 0.1},
        {"critic": "centralized", "granularity": "turn"},
        pytest.param(
            {"critic": "centralized", "granularity": "turn", "critic_model": "same"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_shared_beginnings_change_no_gradient(keys, tmp_path, monkeypatch):
    found = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(Decisions, "packed", one_by_one)
        trainer = build(
            "ppo", tmp_path / str(shared), share_of_letters, num_agents=2, max_steps=1,
            agent_model__torch_dtype="float64", learning_rate=1e-2, **_named(keys),
        )  # fmt: skip
        playing(trainer, conversation).train()
        (line,) = trainer.loop.log.logger.metrics()
        assert line["ratio_max"] >= 1 and line["calls_mean"] == 4
        found.append(weights(trainer))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)


def _named(keys: dict) -> dict:
    from tests.support.tiny_models import folder

    return {k: str(folder("qwen2")) if v == "same" else v for k, v in keys.items()}


async def alone(task, agents):
    text = await agents["main"](agents.prompts["main"])
    return own_shares((text, text))[0]


@pytest.mark.parametrize("critic", ["independent", "centralized"])
def test_an_agent_that_is_not_called_stays_as_it_is(critic, tmp_path):
    trainer = build(
        "ppo", tmp_path / critic, share_of_letters, num_agents=2, max_steps=2, critic=critic,
        granularity="turn", kl_coef=0.1, kl_target=0.1, learning_rate=1e-2,
    )  # fmt: skip
    playing(trainer, alone)
    before = weights(trainer)
    sizes = [len(list(agent.parameters())) for agent in trainer.team.agents]
    trainer.train()
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True)]
    assert not any(moved[: sizes[0]]) and any(moved[sizes[0] : sum(sizes)])
    for line in trainer.loop.log.logger.metrics():
        assert (
            "agent_0/policy_loss" not in line and line["policy_loss"] == line["agent_1/policy_loss"]
        )


async def nobody(task, agents):
    return 1.0


def test_a_step_without_a_call_changes_nothing(tmp_path):
    trainer = build("ppo", tmp_path / "r", share_of_letters, num_agents=2, max_steps=1)
    playing(trainer, nobody)
    before = weights(trainer)
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
