"""tiny-coder: small, an ordinary transformers folder, and made by a program that runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.builtin import COOPMINI, MODELS, TINY_CODER
from comlrl.rewards.code.reward import CodeReward
from comlrl.tasks.prompts import plain_text
from comlrl.types import JointAction, Message, Task
from tools.make_coopmini import MAKER
from tools.tiny_coder.demonstrations import (
    CAREFUL,
    PROMPTS,
    SLIPS,
    Answer,
    Demonstration,
    demonstrations,
    one_return,
    slip,
)
from tools.tiny_coder.pretrain import (
    ANSWERS,
    MODES,
    Phase,
    attention_mask,
    batch_loss,
    make_batch,
    new_model,
    pretrain,
)
from tools.tiny_coder.revisions import revisions


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


def test_packed_loss_equals_one_answer_at_a_time(tokenizer):
    """Rows of several answers, padded, against each answer alone after its prompt."""
    torch.manual_seed(0)
    model = new_model(tokenizer).double()
    rows = list(itertools.islice(demonstrations(0, set(), answers=3), 4))
    batch = make_batch(rows, tokenizer)
    hidden = model.model(
        input_ids=batch["ids"],
        position_ids=batch["positions"],
        attention_mask=attention_mask(batch["segments"]).double(),
    ).last_hidden_state
    chosen = batch["targets"] != -100
    logits = model.lm_head(hidden[chosen])
    packed = torch.nn.functional.cross_entropy(logits, batch["targets"][chosen])
    losses = []
    for row in rows:
        prompt = tokenizer(row.prompt)["input_ids"]
        for answer in row.answers:
            tokens = tokenizer(answer.text)["input_ids"] + [tokenizer.eos_token_id] * answer.ends
            tokens = tokens[:96]
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            losses.append(
                torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="none")
            )
    assert packed.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    assert batch_loss(model, batch).item() == pytest.approx(packed.item(), rel=1e-2)  # bf16 mask


def test_an_endless_answer_has_no_end(tokenizer):
    row = Demonstration("def f(x):\n", (Answer("a b"), Answer("a b", ends=False)))
    targets = make_batch([row], tokenizer)["targets"]
    assert (targets == tokenizer.eos_token_id).sum() == 1


def test_demonstrations_are_seeded_and_diverse():
    def some(seed: int) -> list[Demonstration]:
        return list(itertools.islice(demonstrations(seed, set(), answers=2), 50))

    assert some(0) == some(0)
    assert some(0) != some(1)
    assert len({answer.text for row in some(0) for answer in row.answers}) > 80


def test_what_the_first_tiny_coder_was_shown():
    """Its recipe, whatever else is demonstrated: the stream as it was then."""
    stream = demonstrations(0, MAKER.shipped("eval"), ANSWERS, SLIPS)
    shown = hashlib.sha256(repr(list(itertools.islice(stream, 300))).encode()).hexdigest()
    assert shown == "a3f7bc313a0132dec678372fea15afd402966fa20b3938fa535b5685ecaa3bcd"


def test_long_demonstrations_know_every_helper():
    rows = list(itertools.islice(demonstrations(0, set(), answers=1, long=True), 400))
    texts = "\n".join(answer.text for row in rows for answer in row.answers)
    for name, convention in (("aux", "filter"), ("aux2", "transform"), ("aux4", "reduce")):
        assert f"def {name}(" in texts, convention
    assert "def aux3(y):" in texts and "[aux3(y) for y in ys]" in texts


def test_every_slip_happens():
    source, rng = "def aux(x):\n    return x * (x + 1)\n", random.Random(0)
    texts = [slip(rng, source, "aux") for _ in range(600)]
    assert any(not answer.ends for answer in texts)
    for part in ("```python\n", "Here is the code:", "easy to write", "def helper(", "    ys = x"):
        assert any(part in answer.text for answer in texts), part
    assert sum(answer.text == source.strip() for answer in texts) > 300


def test_one_return():
    assert one_return("def f(d):\n    ys = aux(d)\n    return sum(ys)\n") == (
        "def f(d):\n    return sum(aux(d))\n"
    )
    twice = "def f(d):\n    ys = aux(d)\n    return max(ys) - min(ys)\n"
    assert one_return(twice) == twice


def test_revisions_are_seeded_and_show_every_mode():
    held_out = MAKER.shipped("eval")
    with CodeReward(workers=1) as reward:
        first, again = (
            list(itertools.islice(revisions(0, held_out, 1, reward.score, MODES), 64))
            for _ in range(2)
        )
    assert first == again
    prompts = "\n".join(row.prompt for row in first)
    for part in ("Defined: `", "Definitions: ", "Not all levels passed.", "Your previous answer:"):
        assert part in prompts, part
    kept = [row for row in first if "All levels passed." in row.prompt.split("Feedback:")[-1]]
    assert sum(row.answers[0].text in row.prompt for row in kept) > len(kept) / 2


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


@pytest.mark.slow
def test_pretraining_goes_on():
    with CodeReward(workers=1) as reward:
        before, tokenizer = pretrain([], 0, reward, start=TINY_CODER)
        after, _ = pretrain([Phase(4, 0.5, CAREFUL)], 0, reward, start=TINY_CODER)
    rows = list(itertools.islice(demonstrations(9, set(), answers=2, long=True), 16))
    batch = make_batch(rows, tokenizer)
    with torch.no_grad():
        assert batch_loss(after, batch).item() < batch_loss(before, batch).item() / 1.2
