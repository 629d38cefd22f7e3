"""Stops by text: a completion ends where its text first contains one, however it is tokenized.

The token that completes the stop is the last one that is sampled and trained. The text ends before
the stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

REPLACEMENT = "\ufffd"  # for invalid or incomplete UTF-8


class StopTexts:
    """The texts that end a tokenizer's completions."""

    def __init__(self, tokenizer: Any, texts: tuple[str, ...]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        # Twice each: some decoders strip the space in front of the first token.
        twice = tokenizer.batch_decode([[i, i] for i in range(len(tokenizer))])
        ends = {REPLACEMENT, *(text[-1] for text in texts)}
        # The tokens that may complete a stop hold the last character of one, or its last byte.
        self.completing = frozenset(i for i, text in enumerate(twice) if not ends.isdisjoint(text))
        # Number of last characters that contain any stop which the last token completes.
        self._reach = max(map(len, (*texts, *twice))) + max(map(len, texts))

    def completed_by(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop, given that no earlier one does."""
        if not token_ids or token_ids[-1] not in self.completing:
            return False
        count = 16  # tokens at the end, which is where the stop is
        while True:
            text = self.tokenizer.decode(token_ids[-count:])
            if REPLACEMENT in text:  # the cut may lie within a character
                text = self.tokenizer.decode(token_ids)
            if self._place(text) is not None:
                return True
            if count >= len(token_ids) or len(text) >= self._reach:
                return False
            count *= 2

    def end(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the end of the first stop, or None without a stop."""
        counts = (i for i, token in enumerate(token_ids, 1) if token in self.completing)
        return next((i for i in counts if self.completed_by(token_ids[:i])), None)

    def text_before(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that a stop ends, before the stop, without special tokens."""
        text = self.tokenizer.decode(token_ids)
        text = text[: self._place(text)]
        for token in set(token_ids) & set(self.tokenizer.all_special_ids):
            text = text.replace(self.tokenizer.convert_ids_to_tokens(token), "")
        return text

    def _place(self, text: str) -> int | None:
        """Return the position of the first stop in a text."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return min(places, default=None)


@lru_cache(maxsize=16)
def stop_texts(tokenizer: Any, texts: tuple[str, ...]) -> StopTexts:
    """Return the stop texts, shared by agents and batches: a vocabulary is decoded once."""
    return StopTexts(tokenizer, texts)
