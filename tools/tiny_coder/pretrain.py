"""Makes tiny-coder from nothing: ``python -m tools.tiny_coder.pretrain --out FOLDER``; with
``--long``, tiny-coder-long from tiny-coder, which is not shipped.

A Qwen2 model of about 2.5M parameters learns, on two CPU cores, from generated demonstrations
(``demonstrations``, and ``revisions`` for later turns) that never touch a problem of the eval
splits. tiny-coder-long has its tokenizer and starts from its weights: two thirds of the batches
are of long problems and teams of up to five, the rest as before. A row holds one prompt and several
independent answers to it, each of which sees the prompt and itself; the loss is the cross-entropy
of the answers' tokens, the end-of-sequence token included.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from comlrl.builtin import TINY_CODER
from comlrl.external.plain import Plain
from comlrl.models.pretrained import multiplies_bfloat16_fast
from comlrl.rewards.code.modes import LevelFeedback, LevelPassed, Passed
from comlrl.rewards.code.reward import CodeReward
from tools.make_coopmini import LONG_MAKER, MAKER
from tools.tiny_coder.demonstrations import (
    CAREFUL,
    CARELESS,
    PROMPTS,
    SLIPS,
    Demonstration,
    demonstrations,
)
from tools.tiny_coder.revisions import revisions
from tools.tiny_coder.tokenizer import MAX_LENGTH, train_tokenizer

ANSWERS = 5  # to each prompt
ROWS = 16  # prompts in a batch
REVISIONS_EVERY = 4  # one batch in so many is of later turns
MUON_LEARNING_RATE, ADAMW_LEARNING_RATE = 4e-3, 2e-3  # at their peak
WARMUP = 0.03  # share of the steps
TOKENIZER_PROMPTS = 1500  # of each stream
MAX_ANSWER_TOKENS = 96  # an endless answer is cut here
EMBEDDINGS = 1216  # above the tokenizer's size: room for tokens that loaders add
LENGTH_STEP = 32  # rows' lengths are multiples of it: few shapes, for which memory is kept
LOG_EVERY = 50  # steps
TINY_CODER_LONG = Path("outputs") / "tiny_coder_long"
MODES = (  # external modes, and how often each is met
    (LevelFeedback(PROMPTS, 1), 0.4),
    (LevelFeedback(PROMPTS, None), 0.1),
    (LevelPassed(PROMPTS, 1), 0.15),
    (Passed(PROMPTS, 1), 0.15),
    (Plain(PROMPTS), 0.2),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training."""

    steps: int
    rate: float  # factor on the learning rates
    slips: Mapping[str, float]


# How to write code first; then, shortly, how carelessly: the second sets the reward at the start.
PHASES = (Phase(1000, 1.0, SLIPS), Phase(100, 0.15, CARELESS))
LONG_PHASES = (Phase(360, 0.5, CAREFUL),)


def new_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return the untrained model: few layers and one key-value head, for speed on a CPU."""
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
            attn_implementation="eager",  # type: ignore[call-arg]  # faster than sdpa here
        )
    )


def make_batch(rows: list[Demonstration], tokenizer: Qwen2Tokenizer) -> dict[str, torch.Tensor]:
    """Pack each demonstration into a row: the prompt, then its answers.

    ids, positions, segments [R, L] (segment −1 padding, 0 prompt, s the s-th answer); targets
    [R, L]: the token to predict, −100 where none is.
    """
    texts = [text for row in rows for text in (row.prompt, *(a.text for a in row.answers))]
    encoded = iter(tokenizer(texts)["input_ids"])
    packed = [_pack(row, encoded, tokenizer.eos_token_id) for row in rows]
    length = max(len(columns[0]) for columns in packed)
    length += -length % LENGTH_STEP
    fill = (tokenizer.pad_token_id, 0, -1, -100)
    padded = [
        torch.tensor([columns[i] + [value] * (length - len(columns[i])) for columns in packed])
        for i, value in enumerate(fill)
    ]
    return dict(zip(("ids", "positions", "segments", "targets"), padded, strict=True))


def _pack(row: Demonstration, encoded: Iterator[list[int]], end: int) -> tuple[list[int], ...]:
    """Return one row's ids, positions, segments and targets.

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
    """Return the mask that is added to attention logits: [R, L] → bfloat16 [R, 1, L, L].

    0 where a token may look: at the prompt, and at its own segment up to itself.
    """
    length = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = ((key == query) | (key == 0)) & causal
    return torch.where(seen, 0.0, -1e4).to(torch.bfloat16)[:, None]


def batch_loss(model: Qwen2ForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens."""
    hidden = model.model(
        input_ids=batch["ids"],
        position_ids=batch["positions"],
        attention_mask=attention_mask(batch["segments"]),
    ).last_hidden_state
    chosen = batch["targets"] != -100
    logits = model.lm_head(hidden[chosen]).float()
    return torch.nn.functional.cross_entropy(logits, batch["targets"][chosen])


def new_optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices (half the steps of AdamW), AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=MUON_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            others, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        ),
    ]


def schedule(step: int, steps: int) -> float:
    """Return the learning-rate factor: linear warm-up, then a cosine to a twentieth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def interleaved(sources: Sequence[Iterator[Demonstration]]) -> Iterator[list[Demonstration]]:
    """Yield batches of ``ROWS``, each from one source, in turn."""
    for source in itertools.cycle(sources):
        yield list(itertools.islice(source, ROWS))


def tokenizer_texts(*streams: Iterator[Demonstration]) -> Iterator[str]:
    """Yield the tokenizer's training text: some of each stream."""
    for stream in streams:
        for demonstration in itertools.islice(stream, TOKENIZER_PROMPTS):
            yield demonstration.prompt
            yield from (answer.text for answer in demonstration.answers)


def pretrain(
    phases: Sequence[Phase], seed: int, reward: CodeReward, start: Path | None = None
) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Return the trained model and its tokenizer; deterministic on one machine.

    ``start``: a model to continue from, with long problems beside the others; None: from nothing.
    """
    torch.manual_seed(seed)
    held_out = MAKER.shipped("eval") | LONG_MAKER.shipped("eval")

    def streams(
        seed: int, answers: int, slips: Mapping[str, float]
    ) -> tuple[Iterator[Demonstration], Iterator[Demonstration]]:
        return (
            demonstrations(seed, held_out, answers, slips),
            revisions(seed, held_out, answers, reward.score, MODES),
        )

    if start:
        tokenizer = Qwen2Tokenizer.from_pretrained(start)
        for key in ("is_local", "local_files_only"):  # of this loading, not of the tokenizer
            tokenizer.init_kwargs.pop(key, None)
        model = Qwen2ForCausalLM.from_pretrained(
            start, dtype=torch.float32, attn_implementation="eager"
        ).train()
    else:
        tokenizer = train_tokenizer(tokenizer_texts(*streams(seed + 1, 1, SLIPS)))
        model = new_model(tokenizer)
    for number, phase in enumerate(phases):
        phase_seed = seed + 2 * number
        first, later = streams(phase_seed, ANSWERS, phase.slips)
        sources = [first] * (REVISIONS_EVERY - 1) + [later]
        if start:
            long = demonstrations(phase_seed, held_out, ANSWERS, phase.slips, long=True)
            sources = [long, long, first, long, long, later]
        train(model, tokenizer, interleaved(sources), phase)
    return model.eval(), tokenizer


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    batches: Iterator[list[Demonstration]],
    phase: Phase,
) -> None:
    """Train in place; the final weights are rounded to bfloat16, as they are saved."""
    optimizers = new_optimizers(model)
    peaks = [phase.rate * optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    bfloat16 = multiplies_bfloat16_fast(torch.cpu.get_capabilities())
    begun, recent = time.monotonic(), []
    for step, rows in enumerate(itertools.islice(batches, phase.steps)):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, phase.steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = batch_loss(model, make_batch(rows, tokenizer))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % LOG_EVERY == 0:
            mean, seconds = sum(recent) / len(recent), time.monotonic() - begun
            print(f"step {step + 1}/{phase.steps}  loss {mean:.4f}  {seconds:.0f} s", flush=True)
            recent.clear()
    model.bfloat16().float()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain tiny-coder.")
    parser.add_argument("--long", action="store_true", help="tiny-coder-long, from tiny-coder")
    parser.add_argument(
        "--out", type=Path, help=f"folder; default: the shipped one, or {TINY_CODER_LONG}"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seed and args.out is None:
        parser.error("--seed: the model in the default folder has seed 0; write others with --out")
    with CodeReward() as reward:
        if args.long:
            model, tokenizer = pretrain(LONG_PHASES, args.seed, reward, start=TINY_CODER)
        else:
            model, tokenizer = pretrain(PHASES, args.seed, reward)
    out = args.out or (TINY_CODER_LONG if args.long else TINY_CODER)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
