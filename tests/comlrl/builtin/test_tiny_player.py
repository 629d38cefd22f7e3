"""tiny-player: small, at random among the legal answers, and made by a program that runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.builtin import DATASETS, TINY_PLAYER
from comlrl.config.sections import DatasetConfig
from comlrl.tasks.datasets import load_tasks
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.types import Message
from rewards.arena.games import ARENA
from tools.tiny_player.pretrain import Labels, batch_loss, new_model, next_token_counts, pretrain
from tools.tiny_player.situations import Situation, situations

DRAWN = 1000  # answers whose standard error is meant


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_PLAYER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY_PLAYER, dtype=torch.float32).eval()


@torch.no_grad()
def probabilities(model, tokenizer, prompt: str, answers: tuple[str, ...]) -> torch.Tensor:
    """Of each answer and the end of the sequence after it, exactly."""
    ids, end = tokenizer(prompt)["input_ids"], tokenizer.eos_token_id
    tokens = [[*found, end] for found in tokenizer(list(answers))["input_ids"]]
    assert {len(found) for found in tokens} == {2}  # every answer is one token
    rows = torch.tensor([[*ids, *found] for found in tokens])
    logprobs = model(rows).logits[:, len(ids) - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, rows[:, len(ids) :, None]).sum((1, 2)).exp()


def near_uniform(found: torch.Tensor) -> bool:
    """Within 3 standard errors of what ``DRAWN`` uniform draws would give."""
    share = 1 / len(found)
    error = math.sqrt(share * (1 - share) / DRAWN)
    return bool(((found - share).abs() <= 3 * error).all())


@pytest.mark.parametrize("name", ARENA)
def test_its_first_policy_is_uniform(name, model, tokenizer):
    """On what every agent reads at turn 1 of shipped rows, and on prompts of later turns and later
    agents."""
    game = ARENA[name]
    tasks = load_tasks(DatasetConfig(name=f"builtin:{name}"), "eval", game)
    count = game.agents[0]
    for task in tasks[:2]:
        for agent, text in enumerate(Prompts(game).first(task, count)):
            prompt, answers = plain_text((Message("user", text),)), game.legal(task, agent, count)
            assert near_uniform(probabilities(model, tokenizer, prompt, answers)), text
    for met in itertools.islice(situations(99, name), 8):
        found = probabilities(model, tokenizer, met.prompt, met.answers)
        assert near_uniform(found), (met.prompt, found)


def test_sizes(model, tokenizer):
    assert sum(p.numel() for p in model.parameters()) <= 1_000_000
    assert sum(file.stat().st_size for file in TINY_PLAYER.iterdir()) <= 3_000_000
    assert model.config.model_type == "qwen2"
    assert len(tokenizer) + 16 <= model.config.vocab_size  # room for tokens that loaders add
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.chat_template is None
    assert {f"builtin:{name}" for name in ARENA} <= set(DATASETS)


def test_situations_are_seeded_and_show_what_they_hold():
    def some(seed: int) -> list[Situation]:
        return list(itertools.islice(situations(seed), 110))

    assert some(0) == some(0) != some(1)
    for met in some(2):
        if "chore" not in met.prompt:  # which counts people from 1, and agents from 0
            assert all(word in met.prompt for text in met.contents for word in text.split())
        assert len(set(met.answers)) == len(met.answers) >= 2


def test_counts_of_next_tokens():
    answers = [(1, 2, 0), (1, 3, 0), (4, 0)]
    assert next_token_counts(answers, (1, 3, 0)) == [{1: 2, 4: 1}, {2: 1, 3: 1}, {0: 1}]


def test_the_loss_is_the_divergence_from_uniform(model, tokenizer):
    """Of the shipped model near 0; of one without training, that of the exact probabilities."""
    row = Situation("You and a partner each choose.\n", ("red", "green", "blue"), ("red",))
    untrained = new_model(tokenizer).eval()
    probe = torch.nn.Linear(untrained.config.hidden_size, 10 * 256)
    draw = torch.Generator().manual_seed(0)
    found, _ = batch_loss(untrained, probe, [row], tokenizer, Labels(), draw)
    ids = tokenizer(row.prompt)["input_ids"]
    tokens = [tokenizer(answer)["input_ids"][0] for answer in row.answers]
    with torch.no_grad():
        first = untrained(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[tokens]
        answer = int(torch.randint(3, (1,), generator=torch.Generator().manual_seed(0)))
        after = untrained(torch.tensor([[*ids, tokens[answer]]])).logits[0, -1].log_softmax(-1)
    expected = (-math.log(3) - first.mean() - after[tokenizer.eos_token_id]) / 2
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    met = next(situations(0, "arena-climbing"))
    shipped, _ = batch_loss(model, probe, [met], tokenizer, Labels(), draw)
    assert -1e-6 <= shipped.item() < 0.01


@pytest.mark.slow
def test_pretraining_learns_and_repeats():
    rows = list(itertools.islice(situations(9), 22))
    losses = []
    for _ in range(2):
        model, tokenizer = pretrain(0, steps=40)
        probe = torch.nn.Linear(model.config.hidden_size, 10 * 256)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            loss, _ = batch_loss(model, probe, rows, tokenizer, Labels(), draw)
        losses.append(loss.item())
    assert losses[0] == losses[1] < 1.5
