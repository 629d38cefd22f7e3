"""Content words and transition words of a text.

The twelve kinds of transition words are those of the code published with MAGRPO
(arXiv 2508.04652). The word lists are ours; each word belongs to one kind. Only whole words match:
otherwise "some" would match "so" and "life" would match "if", and any English text would have most
of the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_STOPWORDS = """
    a about after all also am an and any are as at be because been before being but by can could
    did do does doing down each for from had has have having he her here hers him his how i if in
    into is it its just me might more most must my no nor not now of off on once only or other our
    ours out over own same shall she should so some such than that the their theirs them then
    there these they this those through to too under until up us very was we were what when where
    which while who whom why will with would you your yours
"""
STOPWORDS = frozenset(_STOPWORDS.split())
TRANSITIONS: Mapping[str, tuple[str, ...]] = {
    "elaboration": ("furthermore", "moreover", "additionally", "also", "besides", "in addition"),
    "examples": ("for example", "for instance", "such as", "specifically", "in particular"),
    "explanation": ("in other words", "that is to say", "in fact", "namely", "to be exact"),
    "cause_effect": ("because", "therefore", "thus", "hence", "consequently", "as a result", "so"),
    "contrast": ("but", "however", "instead", "in contrast", "on the other hand", "whereas"),
    "sequence": ("first", "second", "third", "next", "then", "lastly", "finally", "at last"),
    "emphasis": ("indeed", "certainly", "clearly", "of course", "above all", "undoubtedly"),
    "summary": ("overall", "in short", "in summary", "to sum up", "in the end", "all in all"),
    "comparison": ("similarly", "likewise", "in the same way", "just as", "compared to"),
    "concession": ("although", "though", "despite", "nevertheless", "nonetheless", "still", "yet"),
    "condition": ("if", "unless", "provided that", "as long as", "in case", "otherwise"),
    "time": ("when", "while", "before", "after", "since", "until", "meanwhile", "later"),
}
_FOUND = {
    kind: re.compile(rf"\b(?:{'|'.join(phrases)})\b") for kind, phrases in TRANSITIONS.items()
}


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def content_words(text: str) -> set[str]:
    """Return the distinct words of a text that carry content."""
    return set(words(text)) - STOPWORDS


def transition_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of transition words in a text, in the order of ``TRANSITIONS``."""
    spaced = " ".join(text.lower().split())
    return tuple(kind for kind, pattern in _FOUND.items() if pattern.search(spaced))
