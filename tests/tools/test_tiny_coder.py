"""tiny-coder: small, an ordinary transformers folder, and made by a program that runs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.builtin import COOPMINI, MODELS, TINY_CODER
from comlrl.rewards.code.reward import CodeReward
from comlrl.tasks.prompts import plain_text
from comlrl.types import JointAction, Message, Task
from tools.tiny_coder.demonstrations import (
    PROMPTS,
    SLIPS,
    demonstrations,
)
from tools.tiny_coder.pretrain import (
    Phase,
    batch_loss,
    make_batch,
    new_model,
    pretrain,
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_CODER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY_CODER, dtype=torch.float32).eval()


def tasks(split: str) -> list[Task]:
    rows = [json.loads(line) for line in COOPMINI[split].read_text().splitlines()]
    return [Task(r["task_id"], r) for r in rows]


def test_sizes(model, tokenizer):
    assert sum(p.numel() for p in model.parameters()) <= 4_000_000
    files = [file for folder in MODELS.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    assert model.config.model_type == "qwen2"
    assert model.config.max_position_embeddings >= 2048
    assert len(tokenizer) + 16 <= model.config.vocab_size  # room for tokens that loaders add


def test_special_tokens(tokenizer):
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert None not in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert tokenizer.chat_template is None


def test_tokens_give_the_text_back(tokenizer):
    texts = ["", "def f(x):\n\treturn 'é – 漢字'\r\n  # 123456", "\n\n    \n"]
    for task in tasks("eval"):
        texts += PROMPTS.first(task, 3)
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)


def test_prompts_are_short_in_tokens(tokenizer):
    lengths = [
        len(tokenizer(prompt)["input_ids"])
        for task in tasks("eval")
        for prompt in PROMPTS.first(task, 2)
    ]
    assert sum(lengths) / len(lengths) < 110


@torch.no_grad()
def test_it_knows_how_to_write_code(model, tokenizer):
    """Greedy solo answers to unseen problems, on a quarter of the eval split."""
    chosen = tasks("eval")[::4]
    prompts = [plain_text((Message("user", PROMPTS.first(task, 1)[0]),)) for task in chosen]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    tokens = model.generate(**batch, do_sample=False, max_new_tokens=56)
    texts = tokenizer.batch_decode(
        tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    with CodeReward(workers=1) as reward:
        scores = reward.score(
            [JointAction(task, (text,)) for task, text in zip(chosen, texts, strict=True)]
        )
    assert sum(score.value for score in scores) / len(scores) > 1.4  # of 2.1


@pytest.mark.slow
def test_pretraining_learns():
    with CodeReward(workers=1) as reward:
        torch.manual_seed(0)
        model, tokenizer = pretrain([Phase(8, 1.0, SLIPS)], 0, reward)
        rows = list(itertools.islice(demonstrations(9, set(), answers=2), 16))
        with torch.no_grad():
            trained = batch_loss(model, make_batch(rows, tokenizer)).item()
            untrained = batch_loss(new_model(tokenizer), make_batch(rows, tokenizer)).item()
    assert trained < untrained / 1.5
