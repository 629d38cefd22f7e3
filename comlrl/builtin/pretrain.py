"""Makes tiny-coder from nothing: ``python -m comlrl.builtin.pretrain --out FOLDER``.

A Qwen2 model of about 2.5M parameters learns, on two CPU cores, from generated demonstrations
(``demonstrations``) that never touch a problem of the eval split. A row holds one prompt and
several independent answers to it, each of which sees the prompt and itself; the loss is the
cross-entropy of the answers' tokens, the end-of-sequence token included.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from comlrl.builtin import TINY_CODER
from comlrl.builtin.demonstrations import Demonstration, demonstrations
from comlrl.builtin.make_coopmini import shipped_operations
from comlrl.builtin.tokenizer import MAX_LENGTH, train_tokenizer

ANSWERS = 5  # to each prompt
ROWS = 16  # prompts in a batch
PEAK_LEARNING_RATE = 2e-3
WARMUP = 0.03  # share of the steps
TOKENIZER_PROMPTS = 4000
MAX_ANSWER_TOKENS = 96  # an endless answer is cut here
EMBEDDINGS = 1216  # above the tokenizer's size: room for tokens that loaders add


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """The untrained model: few layers and one key-value head, for speed on a CPU."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=EMBEDDINGS,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def batches(
    stream: Iterator[Demonstration], tokenizer: PreTrainedTokenizerFast
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of ``ROWS`` demonstrations, endlessly."""
    while True:
        yield make_batch(list(itertools.islice(stream, ROWS)), tokenizer)


def make_batch(
    rows: list[Demonstration], tokenizer: PreTrainedTokenizerFast
) -> dict[str, torch.Tensor]:
    """Packs each demonstration into a row: the prompt, then its answers.

    ids, positions, segments [R, L] (segment −1 padding, 0 prompt, s the s-th answer); targets
    [R, L]: the token to predict, −100 where none is.
    """
    texts = [text for row in rows for text in (row.prompt, *(a.text for a in row.answers))]
    encoded = iter(tokenizer(texts)["input_ids"])
    packed = [_pack(row, encoded, tokenizer.eos_token_id) for row in rows]
    length = max(len(columns[0]) for columns in packed)
    fill = (tokenizer.pad_token_id, 0, -1, -100)
    padded = [
        torch.tensor([columns[i] + [value] * (length - len(columns[i])) for columns in packed])
        for i, value in enumerate(fill)
    ]
    return dict(zip(("ids", "positions", "segments", "targets"), padded, strict=True))


def _pack(row: Demonstration, encoded: Iterator[list[int]], end: int) -> tuple[list[int], ...]:
    """One row's ids, positions, segments and targets.

    An answer's first token is predicted by the prompt's last one, which all answers share; so each
    answer begins with a copy of it.
    """
    prompt = next(encoded)
    start = len(prompt) - 1
    ids, positions = list(prompt[:-1]), list(range(start))
    segments, targets = [0] * start, [-100] * start
    for number, answer in enumerate(row.answers, start=1):
        tokens = (next(encoded) + [end] * answer.ends)[:MAX_ANSWER_TOKENS]
        ids += [prompt[-1], *tokens[:-1]]
        targets += tokens
        positions += range(start, start + len(tokens))
        segments += [number] * len(tokens)
    return ids, positions, segments, targets


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """[R, L] → bool [R, 1, L, L]: a token sees the prompt and its own segment up to itself."""
    length = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (((key == query) | (key == 0)) & causal)[:, None]


def batch_loss(model: Qwen2ForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens."""
    hidden = model.model(
        input_ids=batch["ids"],
        position_ids=batch["positions"],
        attention_mask=attention_mask(batch["segments"]),
    ).last_hidden_state
    chosen = batch["targets"] != -100
    logits = model.lm_head(hidden[chosen]).float()
    return torch.nn.functional.cross_entropy(logits, batch["targets"][chosen])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a twentieth of the peak."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return PEAK_LEARNING_RATE * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def pretrain(
    steps: int, seed: int, log_every: int = 50
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The trained model and its tokenizer."""
    torch.manual_seed(seed)
    held_out = shipped_operations("eval")
    sample = itertools.islice(demonstrations(seed + 1, held_out, 2), TOKENIZER_PROMPTS)
    tokenizer = train_tokenizer(t for d in sample for t in (d.prompt, *(a.text for a in d.answers)))
    model = new_model(tokenizer)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    data = batches(demonstrations(seed, held_out, ANSWERS), tokenizer)
    begun, loss_sum = time.monotonic(), 0.0
    for step, batch in enumerate(itertools.islice(data, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.item()
        if (step + 1) % log_every == 0:
            mean, loss_sum = loss_sum / log_every, 0.0
            print(
                f"step {step + 1}/{steps}  loss {mean:.4f}  {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    return model.eval(), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain tiny-coder.")
    parser.add_argument("--out", type=Path, default=TINY_CODER, help="folder to write")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, tokenizer = pretrain(args.steps, args.seed)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
