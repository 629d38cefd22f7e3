"""Small tokenizers of the usual kinds, with special tokens of any name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "def f(x):\n    return aux(x) + 1\n```\n\nThe end.</answer>\n" * 3,
    "```python\ndef main(n):\n    if n:\n        return [aux(i) for i in range(n)]\n```\n" * 3,
    "naïve café, 数学 and 🙂🙃 <answer>\n\n\n### Response:\n<im_start> end user system < | > " * 3,
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # leaves out earlier thoughts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def byte_level(*special: str, added: Sequence[str] = (), size: int = 400) -> Any:
    """BPE over bytes, as Qwen, Llama 3, GPT-2 and SmolLM2 have it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return _fast(core, special, added)


def byte_fallback(*special: str, added: Sequence[str] = (), size: int = 300) -> Any:
    """BPE over characters with bytes for those that are unknown, as Llama 2, Mistral and Gemma."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    latin = [chr(c) for c in range(32, 127)]
    trained.train_from_iterator(
        [text.encode("ascii", "ignore").decode() for text in CORPUS],
        BpeTrainer(vocab_size=size, initial_alphabet=[*latin, "▁", "\n"], show_progress=False),
    )
    core = Tokenizer.from_str(_with_bytes(trained.to_str()))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return _fast(core, special, added)


def _with_bytes(text: str) -> str:
    made = json.loads(text)
    vocabulary = made["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    made["model"]["byte_fallback"] = True
    return json.dumps(made)


def _fast(core: Tokenizer, special: tuple[str, ...], added: Sequence[str]) -> Any:
    names = ("<eos>", *special)
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    core.add_tokens([AddedToken(name, normalized=False) for name in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", extra_special_tokens=list(special)
    )
