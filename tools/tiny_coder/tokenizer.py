"""tiny-coder's tokenizer: Qwen's kind (byte-level BPE), learned on the pretraining text itself."""

from __future__ import annotations

import json
from collections.abc import Iterable

from transformers import Qwen2Tokenizer

END, PAD = "<|end|>", "<|pad|>"
VOCAB_SIZE = 1152
MAX_LENGTH = 2048


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Qwen2Tokenizer:
    """Train a tokenizer of ``vocab_size`` tokens that reproduces every text (in NFC).

    Its class is Qwen's: transformers loads any tokenizer beside a Qwen2 model as that class, which
    splits text in its own way whatever the folder says.
    """
    from tokenizers import pre_tokenizers, trainers

    trained = Qwen2Tokenizer(eos_token=END, pad_token=PAD, unk_token=END).backend_tokenizer
    trained.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learned = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],  # type: ignore[misc]
        eos_token=END,
        pad_token=PAD,
        unk_token=END,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
