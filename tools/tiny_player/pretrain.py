"""Makes tiny-player from nothing: ``python -m tools.tiny_player.pretrain``.

A Qwen2 model of 0.2M parameters learns to answer the prompts of the arena's games
(``situations``) with a legal answer and the end-of-sequence token, each answer equally likely. The
loss is the cross-entropy with exactly that distribution. An answer that is drawn at random shows
nothing of the prompt, so a second loss asks the hidden states for what the prompt says: a linear
probe, dropped after training, reads it off the input of the last layer. Learning to use it is left
to reinforcement learning.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from comlrl.builtin import TINY_PLAYER
from tools.tiny_coder.pretrain import new_optimizers, schedule
from tools.tiny_coder.tokenizer import MAX_LENGTH, train_tokenizer
from tools.tiny_player.situations import Situation, situations

VOCAB_SIZE, EMBEDDINGS = 704, 736  # tokens; rows: room for tokens that loaders add
TOKENIZER_PROMPTS = 6000
STEPS, ROWS = 1500, 55  # prompts in a batch: five rounds of the games
PART = 11  # prompts that are padded to one length
PLACES, LABELS = 10, 256  # contents of a prompt, and different ones of a place
PROBE_WEIGHT = 0.3
LOG_EVERY = 50  # steps
IGNORED = -100


def new_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """The untrained model."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=EMBEDDINGS,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
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
    """At each token of ``answer``: how many of the answers that agree so far have which token."""
    return [
        Counter(other[place] for other in answers if other[:place] == answer[:place])
        for place in range(len(answer))
    ]


class Labels:
    """Contents as class numbers, given out as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, contents: Sequence[str]) -> list[int]:
        """A number for each place; IGNORED where there is nothing."""
        found = [self.numbers.setdefault(text, len(self.numbers)) for text in contents]
        assert len(self.numbers) <= LABELS and len(found) <= PLACES
        found = [n if text else IGNORED for n, text in zip(found, contents, strict=True)]
        return found + [IGNORED] * (PLACES - len(found))


def batch_loss(
    model: Qwen2ForCausalLM,
    probe: torch.nn.Linear,
    rows: Sequence[Situation],
    tokenizer: Qwen2Tokenizer,
    labels: Labels,
    draw: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean KL from the uniform distribution over answers to the model's at each token of one drawn
    answer a row; mean cross-entropy of the probe."""
    end = tokenizer.eos_token_id
    encoded, targets, places = [], [], []
    for number, row in enumerate(rows):
        prompt = tokenizer(row.prompt)["input_ids"]
        answers = [(*ids, end) for ids in tokenizer(list(row.answers))["input_ids"]]
        answer = answers[int(torch.randint(len(answers), (1,), generator=draw))]
        encoded.append(torch.tensor([*prompt, *answer[:-1]]))
        places.append((number, len(prompt) - 1))
        for place, counts in enumerate(next_token_counts(answers, answer)):
            targets.append((number, len(prompt) - 1 + place, counts))
    ids = torch.nn.utils.rnn.pad_sequence(encoded, True, float(tokenizer.pad_token_id))
    output = model.model(input_ids=ids, output_hidden_states=True)  # padding is on the right
    wanted = torch.zeros(len(targets), EMBEDDINGS)
    for line, (_, _, counts) in enumerate(targets):
        for token, count in counts.items():
            wanted[line, token] = count / counts.total()
    at = ([t[0] for t in targets], [t[1] for t in targets])
    logits = model.lm_head(output.last_hidden_state[at]).float()
    entropy = -torch.special.xlogy(wanted, wanted).sum(-1).mean()
    divergence = cross_entropy(logits, wanted) - entropy
    before = output.hidden_states[-2][[p[0] for p in places], [p[1] for p in places]]
    contents = torch.tensor([labels.of(row.contents) for row in rows])
    found = probe(before).float().view(len(rows) * PLACES, LABELS)
    missed = cross_entropy(found, contents.flatten(), ignore_index=IGNORED, reduction="sum")
    return divergence, missed / max(1, int((contents != IGNORED).sum()))


def pretrain(seed: int, steps: int = STEPS) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """The trained model and its tokenizer; on one machine, the same arguments give the same."""
    torch.manual_seed(seed)
    texts = list(itertools.islice(situations(seed + 1), TOKENIZER_PROMPTS))
    tokenizer = train_tokenizer(
        (text for row in texts for text in (row.prompt, *row.answers)), VOCAB_SIZE
    )
    model = new_model(tokenizer)
    probe = torch.nn.Linear(model.config.hidden_size, PLACES * LABELS)
    train(model, probe, tokenizer, situations(seed), steps)
    return model.eval(), tokenizer


def train(
    model: Qwen2ForCausalLM,
    probe: torch.nn.Linear,
    tokenizer: Qwen2Tokenizer,
    stream: Iterator[Situation],
    steps: int,
) -> None:
    """Trains in place; the weights end as they will be saved, rounded to bfloat16."""
    optimizers = new_optimizers(model)
    optimizers.append(torch.optim.AdamW(probe.parameters(), lr=2e-3, weight_decay=0.0))
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    labels, draw = Labels(), torch.Generator().manual_seed(0)
    begun, recent = time.monotonic(), []
    for step in range(steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, steps)
        batch = sorted(itertools.islice(stream, ROWS), key=lambda row: len(row.prompt))
        for part in range(0, ROWS, PART):  # of like lengths, so that little is padding
            rows = batch[part : part + PART]
            divergence, missed = batch_loss(model, probe, rows, tokenizer, labels, draw)
            (divergence + PROBE_WEIGHT * missed).backward()
            recent.append((divergence.item(), missed.item()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0:
            kl, probed = (sum(column) / len(column) for column in zip(*recent, strict=True))
            seconds = time.monotonic() - begun
            print(f"step {step + 1}/{steps}  KL {kl:.5f}  probe {probed:.4f}  {seconds:.0f} s",
                  flush=True)  # fmt: skip
            recent.clear()
    model.bfloat16().float()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain tiny-player.")
    parser.add_argument("--out", type=Path, default=TINY_PLAYER, help="default: the shipped one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    model, tokenizer = pretrain(args.seed, args.steps)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
