"""tiny-player: small, at random among the legal answers, and made by a program that runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.builtin import DATASETS, TINY_PLAYER
from comlrl.config.sections import DatasetConfig
from comlrl.rewards.arena.games import ARENA
from comlrl.tasks.datasets import load_tasks
from comlrl.tasks.prompts import Prompts, plain_text
from comlrl.types import Message
from tools.tiny_player.pretrain import (
    divergence,
    make_batch,
    new_model,
    next_token_counts,
    pretrain,
)
from tools.tiny_player.probing import NOTHING, PLACES, Labels, Probe
from tools.tiny_player.situations import Situation, situations

RED = Situation("Player 1 chose red.\n", ("red", "green"), ("red",))
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


def test_the_loss_is_the_divergence_from_uniform(tokenizer):
    """Of one answer's two tokens, padded beside a longer prompt, from each token's logits alone."""
    torch.manual_seed(0)
    row = Situation("Choose one.\n", ("red", "green", "blue"), ())
    longer = Situation("You and a partner each choose red, green or blue.\n", ("red",), ())
    model = new_model(tokenizer).eval()
    batch = make_batch([row, longer], tokenizer, torch.Generator().manual_seed(0))
    ids, end = tokenizer(row.prompt)["input_ids"], tokenizer.eos_token_id
    tokens = [tokenizer(answer)["input_ids"][0] for answer in row.answers]
    answer = int(torch.randint(3, (1,), generator=torch.Generator().manual_seed(0)))
    red = [*tokenizer(longer.prompt)["input_ids"], tokens[0]]

    def logprobs(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)

    with torch.no_grad():
        first = -math.log(3) - logprobs(ids)[tokens].mean()
        rest = -logprobs([*ids, tokens[answer]])[end] - logprobs(red[:-1])[red[-1]]
        rest = rest - logprobs(red)[end]
        assert divergence(model, batch).item() == pytest.approx((first + rest).item() / 4, rel=1e-4)


def test_the_shipped_model_is_near_uniform_by_its_own_loss(model, tokenizer):
    rows = list(itertools.islice(situations(0), 22))
    batch = make_batch(rows, tokenizer, torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert -1e-6 <= divergence(model, batch).item() < 0.01


def test_the_probe_sees_directions_of_the_right_inputs(tokenizer):
    """Each matrix's input at the prompt's last token; a longer input has the same loss."""
    torch.manual_seed(0)
    rows = [Situation("The symbol is cat.\n", ("A", "B"), ("cat", "")), *[RED] * 2]
    model = new_model(tokenizer)
    batch = make_batch(rows, tokenizer, torch.Generator().manual_seed(0))
    labels = Labels().encode(rows)
    assert labels.shape == (3, PLACES) and (labels != NOTHING).sum() == 3
    assert labels[1, 0] == labels[2, 0] != labels[0, 0]
    with Probe(model) as probe:
        divergence(model, batch)
        assert len(probe.inputs) == len(probe.weights) == 7
        found = probe.loss(batch.prompt_ends, labels)
        for name in probe.inputs:
            probe.inputs[name] = 3 * probe.inputs[name]
        assert probe.loss(batch.prompt_ends, labels).item() == pytest.approx(found.item())
        rows_R, columns_R = batch.prompt_ends
        last = batch.ids_RL[rows_R, columns_R]
        assert tokenizer.decode(last) == "\n" * 3 or len(set(last.tolist())) <= 2


@pytest.mark.slow
def test_pretraining_learns_and_repeats():
    rows = list(itertools.islice(situations(9), 22))
    losses = []
    for _ in range(2):
        model, tokenizer = pretrain(0, steps=60)
        batch = make_batch(rows, tokenizer, torch.Generator().manual_seed(0))
        with torch.no_grad():
            losses.append(divergence(model, batch).item())
    assert losses[0] == losses[1] < 1.5
