"""Makes tiny-player from nothing: ``python -m tools.tiny_player.pretrain``.

A Qwen2 model of 0.15M parameters learns to answer the prompts of the arena's games (``situations``)
with a legal answer and the end-of-sequence token, each answer equally likely. The loss is the
cross-entropy with exactly that distribution.

Such a model may ignore what a prompt says, and adapters could then move all its answers only
together. So a second loss (``probing``) asks for the contents of the prompt at the input of every
layer's matrices, where an adapter reads. What to do with them is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from comlrl.builtin import TINY_PLAYER
from tools.tiny_coder.pretrain import new_optimizers, schedule
from tools.tiny_coder.tokenizer import MAX_LENGTH, train_tokenizer
from tools.tiny_player.probing import Labels, Probe
from tools.tiny_player.situations import Situation, situations

VOCAB_SIZE, EMBEDDINGS = 704, 736  # tokens; rows: room for tokens that loaders add
TOKENIZER_PROMPTS = 6000
STEPS, ROWS = 1200, 55  # prompts in a batch: five rounds of the games
PART = 11  # prompts that are padded to one length
PROBE_WEIGHT = 0.5  # at its peak; it follows the learning rate, so that the answers are exact
LOG_EVERY = 50  # steps


class Batch(NamedTuple):
    """Prompts, each with one of its answers, in tokens."""

    ids_RL: torch.Tensor  # int64; padding is on the right
    prompt_ends: tuple[list[int], list[int]]  # rows and columns of the prompts' last tokens
    action_places: tuple[list[int], list[int]]  # of the tokens that an answer's token follows
    wanted_AV: torch.Tensor  # the distribution of the token that follows each of them


def new_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return the untrained model, no larger than the games need: runs on it take seconds."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=EMBEDDINGS,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def next_token_counts(
    answers: Sequence[tuple[int, ...]], answer: tuple[int, ...]
) -> list[Counter[int]]:
    """Count the next tokens at each token of ``answer``, among the answers that agree so far."""
    return [
        Counter(other[place] for other in answers if other[:place] == answer[:place])
        for place in range(len(answer))
    ]


def make_batch(
    rows: Sequence[Situation], tokenizer: Qwen2Tokenizer, draw: torch.Generator
) -> Batch:
    """Return each situation with an answer that ``draw`` chooses."""
    encoded, ends, places, wanted = [], [], [], []
    for number, row in enumerate(rows):
        prompt = tokenizer(row.prompt)["input_ids"]
        endings = tokenizer(list(row.answers))["input_ids"]
        answers = [(*ids, tokenizer.eos_token_id) for ids in endings]
        answer = answers[int(torch.randint(len(answers), (1,), generator=draw))]
        encoded.append(torch.tensor([*prompt, *answer[:-1]]))
        ends.append((number, len(prompt) - 1))
        for place, counts in enumerate(next_token_counts(answers, answer)):
            places.append((number, len(prompt) - 1 + place))
            line = torch.zeros(EMBEDDINGS)
            for token, count in counts.items():
                line[token] = count / sum(counts.values())
            wanted.append(line)
    ids = torch.nn.utils.rnn.pad_sequence(encoded, True, float(tokenizer.pad_token_id))
    return Batch(ids, _columns(ends), _columns(places), torch.stack(wanted))


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [row for row, _ in pairs], [column for _, column in pairs]


def divergence(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the mean KL(uniform over legal answers ‖ model) over answer tokens, in nats."""
    hidden = model.model(input_ids=batch.ids_RL).last_hidden_state
    logits = model.lm_head(hidden[batch.action_places]).float()
    entropy = -torch.special.xlogy(batch.wanted_AV, batch.wanted_AV).sum(-1).mean()
    return cross_entropy(logits, batch.wanted_AV) - entropy


def pretrain(seed: int, steps: int = STEPS) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Return the trained model and its tokenizer; deterministic on one machine."""
    torch.manual_seed(seed)
    texts = list(itertools.islice(situations(seed + 1), TOKENIZER_PROMPTS))
    tokenizer = train_tokenizer(
        (text for row in texts for text in (row.prompt, *row.answers)), VOCAB_SIZE
    )
    model = new_model(tokenizer)
    with Probe(model) as probe:
        train(model, probe, tokenizer, situations(seed), steps)
    return model.eval(), tokenizer


def train(
    model: Qwen2ForCausalLM,
    probe: Probe,
    tokenizer: Qwen2Tokenizer,
    stream: Iterator[Situation],
    steps: int,
) -> None:
    """Train in place; the final weights are rounded to bfloat16, as they are saved."""
    optimizers = new_optimizers(model)
    optimizers.append(torch.optim.AdamW(probe.weights, lr=1e-2, weight_decay=0.0))
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    labels, draw = Labels(), torch.Generator().manual_seed(0)
    begun, recent = time.monotonic(), []
    for step in range(steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, steps)
        weight = PROBE_WEIGHT * schedule(step, steps)
        rows = sorted(itertools.islice(stream, ROWS), key=lambda row: len(row.prompt))
        for start in range(0, ROWS, PART):
            part = rows[start : start + PART]
            batch = make_batch(part, tokenizer, draw)
            apart = divergence(model, batch)
            missed = probe.loss(batch.prompt_ends, labels.encode(part))
            ((apart + weight * missed) * PART / ROWS).backward()
            recent.append((apart.item(), missed.item()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0:
            kl, probed = (sum(column) / len(column) for column in zip(*recent, strict=True))
            seconds = time.monotonic() - begun
            line = f"step {step + 1}/{steps}  KL {kl:.5f}  probe {probed:.3f}  {seconds:.0f} s"
            print(line, flush=True)
            recent.clear()
    model.bfloat16().float()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain tiny-player.")
    parser.add_argument("--out", type=Path, help="folder; default: the shipped one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    if args.out is None and (args.seed, args.steps) != (0, STEPS):
        parser.error(f"the shipped model has seed 0 and {STEPS} steps; write others with --out")
    out = args.out or TINY_PLAYER
    model, tokenizer = pretrain(args.seed, args.steps)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
