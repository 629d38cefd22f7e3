"""MAGRPO on episodes of programs: as on trees where both can be, and as without sharing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comlrl.credit.decisions import Decisions
from comlrl.quoting import clean
from comlrl.types import Row
from comlrl.update.policy_update import PolicyUpdate
from tests.support.fakes import PROMPTS
from tests.support.played import conversation, one_by_one, playing, simultaneous
from tests.support.tiny_trainers import build, share_of_letters


def trained(trainer, monkeypatch) -> tuple[list[list[Row]], list[torch.Tensor]]:
    """Each agent's rows in all updates, and the weights in the end."""
    rows: list[list[Row]] = [[] for _ in trainer.team.agents]
    gradients = PolicyUpdate.gradients

    def keep(policy, given, optimizers, denominator, *arguments):
        """Rows with Â / G, which are averaged over nodes."""
        completions = trainer.section.shape.generations(policy.agent.index)
        rows[policy.agent.index] += [
            replace(r, weights=tuple(
                w * float(policy.advantage.of_completion[n].unique()) / completions
                for w, n in zip(r.weights, r.indices, strict=True)
            ))
            for r in given
        ]  # fmt: skip
        return gradients(policy, given, optimizers, denominator, *arguments)

    monkeypatch.setattr(PolicyUpdate, "gradients", keep)
    trainer.train()
    monkeypatch.setattr(PolicyUpdate, "gradients", gradients)
    weights = [p.detach().clone() for agent in trainer.team.agents for p in agent.parameters()]
    return rows, weights


async def sequential(task, agents):
    first = await agents["aux"](agents.prompts["aux"])
    shown = PROMPTS.handed_on(task, 1, 2, [clean(first)])
    prompt = f"{agents.prompts['main'].rstrip()}\n\n{shown}"
    return await agents.score([first, await agents["main"](prompt)])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"update_epochs": 2, "kl_coef": 0.1, "entropy_coef": 0.01, "train_batch_size": 1},
        {"advantage": "greedy", "advantage_normalization": True},
        {"advantage": "rloo", "top_k": 20},
    ],
)
def test_a_simultaneous_turn_as_a_program_is_magrpo_to_the_bit(keys, tmp_path, monkeypatch):
    found = []
    for number, episodes in enumerate((False, True)):
        trainer = build("magrpo", tmp_path / str(number), share_of_letters, **keys)
        if episodes:
            playing(trainer, simultaneous)
        found.append((*trained(trainer, monkeypatch), trainer.loop.log.logger.metrics()))
    (rows, weights, metrics), (own_rows, own_weights, own_metrics) = found
    assert _plain(own_rows) == _plain(rows) and any(rows)
    assert all(torch.equal(own, other) for own, other in zip(own_weights, weights, strict=True))
    for own, other in zip(own_metrics, metrics, strict=True):
        clocks = ("seconds", "time/", "peak", "per_second")
        shared = {k for k in own.keys() & other.keys() if not any(c in k for c in clocks)}
        assert {k: own[k] for k in shared} == pytest.approx({k: other[k] for k in shared})
        assert {"loss", "reward_mean", "gradient_norm", "agent_1/entropy"} <= shared


class KeysOfTrees:
    """Asks for the second agent's answers by the keys that they have in a sequential turn."""

    def __init__(self, sampler) -> None:
        self.sampler, self.token_texts = sampler, sampler.token_texts
        self.encode, self.fits = sampler.encode, sampler.fits

    def sample(self, requests_N, sampling):
        first, second = requests_N
        second = [
            replace(r, keys_G=tuple((*key[:-3], (key[-1],), 1, 0) for key in r.keys_G))
            for r in second
        ]
        return self.sampler.sample([first, second], sampling)


def test_a_sequential_turn_as_a_program_without_a_baseline_is_magrpo(tmp_path, monkeypatch):
    """With a baseline it is not: a program's answers are compared over a task's episodes."""
    found = []
    for number, order in enumerate(("sequential", "simultaneous")):
        trainer = build(
            "magrpo", tmp_path / str(number), lambda texts: 1 + share_of_letters(texts),
            advantage="raw", max_steps=1, num_generations=2, num_generations_sequential=1,
            turn_order=order,
        )  # fmt: skip
        if number:
            playing(trainer, sequential)
            trainer.rollout.sampler = KeysOfTrees(trainer.rollout.sampler)
        found.append(trained(trainer, monkeypatch))
    (rows, weights), (own_rows, own_weights) = found
    for agent in (0, 1):
        own, other = (_completions(each[agent]) for each in (own_rows, rows))
        assert own == other
        # Over the nodes that a loss is averaged over: a task's two first answers are of one node
        # of a tree, each of weight Â/2, and the second ones of two, each of weight Â/1.
        own_C, weights_C = (_weights(each[agent]) for each in (own_rows, rows))
        assert own_C == pytest.approx([w / (1 + agent) for w in weights_C])
        assert len(set(own_C)) == 4
    for own, other in zip(own_weights, weights, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def _weights(rows):
    return [weight for r in rows for weight in r.weights]


def _completions(rows):
    return [(r.prompt_ids, ids) for r in rows for ids in r.completions]


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
@pytest.mark.parametrize(
    "keys", [{}, {"update_epochs": 2, "kl_coef": 0.1, "entropy_coef": 0.01, "top_k": 20}]
)
def test_shared_beginnings_change_no_gradient(kind, keys, tmp_path, monkeypatch):
    found = []
    for shared in (True, False):
        trainer = build(
            "magrpo", tmp_path / str(shared), share_of_letters, kind=kind, max_steps=1,
            agent_model__torch_dtype="float64", learning_rate=1e-2, **keys,
        )  # fmt: skip
        playing(trainer, conversation)
        if not shared:
            monkeypatch.setattr(Decisions, "packed", one_by_one)
        rows, weights = trained(trainer, monkeypatch)
        found.append(weights)
        contexts = [row.contexts for own in rows for row in own]
        assert any(contexts) == shared
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-10)


def _plain(rows):
    """Rows without the tensors of their sets, which do not compare."""
    return [
        [(r.prompt_ids, r.completions, r.weights, r.indices, r.contexts) for r in own]
        for own in rows
    ]
