"""tiny-player: small, at random among the legal answers, and made by a program that runs."""

from __future__ import annotations

import importlib
import itertools
import math
import sys

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
    pretrain,
)
from tools.tiny_player.situations import situations

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


@pytest.mark.parametrize(
    ("module", "option"),
    [
        ("tiny_player", "--seed"),
        ("tiny_player", "--steps"),
        ("tiny_coder", "--seed"),
    ],
)
def test_other_weights_do_not_replace_the_shipped_ones(module, option, monkeypatch, capsys):
    program = importlib.import_module(f"tools.{module}.pretrain")
    monkeypatch.setattr(program, "pretrain", lambda *_: pytest.fail("begun"))
    monkeypatch.setattr(sys, "argv", ["pretrain", option, "7"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2 and "--out" in capsys.readouterr().err


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
