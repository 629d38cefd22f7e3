"""Stops by text against the slow way: decode all tokens so far, after every token."""

from __future__ import annotations

import random

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from comlrl.rollout.stops import StopTexts
from tests.support import tiny_tokenizers as tokenizers

TOKENIZERS = {
    "byte-level": tokenizers.byte_level("<|im_end|>"),
    "byte fallback": tokenizers.byte_fallback("</s>"),
}
STOPS = [
    ("```",), ("</answer>",), ("\n\n",), ("\n\n\n", "def"), ("é",), ("🙂",), ("数学", "🙃🙂"),
    (" ",), ("x", "fx"), ("<|im_end|>",), ("\n</s>", "\n<|im_end|>"), ("never there",),
]  # fmt: skip
PIECES = [
    "``", "`", "```", "</", "answer>", "</answer>", "\n", "\n\n", "def f(x):", "é", "🙂", "🙃",
    "数学", "数", " ", "  ", "x", "never", " there", "<|im_end|>", "</s>",
]  # fmt: skip


def tokenizations(tokenizer, count: int, seed: int = 0):
    """Token ids of texts cut anywhere, bytes of characters apart, and of any tokens."""
    draw = random.Random(seed)
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < 60:
            if draw.random() < 0.3:
                ids.append(draw.randrange(len(tokenizer) + 5))  # some are beyond the tokenizer
            else:
                text = draw.choice(PIECES)
                cut = draw.randint(0, len(text))
                for part in (text[:cut], text[cut:]):
                    ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        yield tuple(ids[:60])


def slow_end(tokenizer, stops, ids) -> int | None:
    for count in range(1, len(ids) + 1):
        if any(stop in tokenizer.decode(ids[:count]) for stop in stops):
            return count
    return None


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_a_completion_ends_where_its_text_first_holds_a_stop(kind, stops):
    tokenizer = TOKENIZERS[kind]
    made, ended = StopTexts(tokenizer, stops), 0
    for ids in tokenizations(tokenizer, 40):
        end = made.end(ids)
        assert end == slow_end(tokenizer, stops, ids)
        if end is None:
            continue
        ended += 1
        text = tokenizer.decode(ids[:end])
        place = min(text.find(stop) for stop in stops if stop in text)
        shown = made.text_before(ids[:end])
        special = set(ids[:end]) & set(tokenizer.all_special_ids)
        if special:
            assert not any(name in shown for name in tokenizer.convert_ids_to_tokens(special))
        else:
            assert shown == text[:place]
    impossible = {"<|im_end|>": "byte fallback"}.get(stops[0]) == kind or stops[0] == "never there"
    assert impossible or ended


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_character_is_complete_with_its_last_byte(kind):
    tokenizer = TOKENIZERS[kind]
    ids = [_byte(tokenizer, byte) for byte in "🙂".encode()]
    before = tokenizer("a" * 30, add_special_tokens=False)["input_ids"]
    made = StopTexts(tokenizer, ("🙂",))
    assert made.end([*before, *ids, *before]) == len(before) + 4
    assert made.text_before([*before, *ids]) == "a" * 30
    assert made.end([*before, *ids[:3]]) is None


def _byte(tokenizer, byte: int) -> int:
    """The token that is a single byte."""
    names = (f"<0x{byte:02X}>", bytes_to_unicode()[byte])
    vocabulary = tokenizer.get_vocab()
    return next(vocabulary[name] for name in names if name in vocabulary)
