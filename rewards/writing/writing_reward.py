"""The reward of summaries: lengths, vocabulary and transition words, by rules alone.

The levels, ranges and weights are those of the code published with MAGRPO (arXiv 2508.04652) for
`trl-lib/tldr`, with two agents. For each summary and the longer one that follows it:

| level | part | value | continues where |
|---|---|---|---|
| 1 | structure | +0.5 where both have 8 to 256 words | they have |
| 2 | structure | + up to 1.0: ratio of their characters, all of it from 1.6 to 3.2 | 1.1 to 5.0 |
| 3 | structure | + up to 0.5: ratio of their different words, all of it from 2.0 | from 1.3 |
| 4 | style | + up to 0.6: Jaccard similarity of their content words, all of it from 0.03 | |
| 4 | coherence | + 0.16 for one kind of transition words in the longer, + 0.02 a further one | |

Between the ranges the terms are linear. At most 2.98: there are twelve kinds (published as 3.0).
Ours: whole transition words (``words.py``); texts without a content word share nothing
(published: all); a team of more than two earns the mean over its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from comlrl.rewards.writing.words import TRANSITIONS, content_words, transition_kinds, words
from comlrl.types import JointAction, Reward, Score

WORDS = (8, 256)  # of a summary
LENGTH_RATIO = (1.1, 1.6, 3.2, 5.0)  # nothing below, all from, all to, nothing above
UNIQUE_RATIO = (1.3, 2.0)  # nothing below, all from
SIMILARITY = 0.03  # all from
STYLE, COHERENCE = 0.6, 0.4  # weights of level 4
PARTS = ("structure", "style", "coherence")


@dataclass(frozen=True, slots=True)
class Step:
    """The gain of a summary over the shorter one before it, whether or not its level counts."""

    words: tuple[int, int]  # of the shorter and the longer, as white space parts them
    length_ratio: float | None  # longer / shorter; None: the shorter one has nothing to compare
    unique_ratio: float | None
    similarity: float
    transitions: tuple[str, ...]  # kinds, of the longer one


def ratio(longer: int, shorter: int) -> float | None:
    """Return longer / shorter, in [0, ∞); None if shorter is 0."""
    return longer / shorter if shorter else None


def ramp(value: float, nothing: float, everything: float) -> float:
    """Return (value − nothing) / (everything − nothing), clipped to [0, 1]; any order."""
    return min(1.0, max(0.0, (value - nothing) / (everything - nothing)))


def length_score(length_ratio: float) -> float:
    """Return min(ramp(r, 1.1, 1.6), ramp(r, 5.0, 3.2)), in [0, 1]; level 2 as published."""
    low, full_low, full_high, high = LENGTH_RATIO
    return min(ramp(length_ratio, low, full_low), ramp(length_ratio, high, full_high))


def unique_score(unique_ratio: float) -> float:
    """Return 0.5 · ramp(r, 1.3, 2.0), in [0, 0.5]; level 3 as published."""
    return 0.5 * ramp(unique_ratio, *UNIQUE_RATIO)


def jaccard(first: set[str], second: set[str]) -> float:
    """Return |first ∩ second| / |first ∪ second|, in [0, 1]; 0 for two empty sets."""
    return len(first & second) / max(1, len(first | second))


def style_score(similarity: float) -> float:
    """Return 0.6 · min(similarity / 0.03, 1), in [0, 0.6]; part of level 4 as published."""
    return STYLE * ramp(similarity, 0.0, SIMILARITY)


def coherence_score(kinds: int) -> float:
    """Return 0.4 · (0.4 + 0.05 (kinds − 1)), in [0, 0.38], 0 for no kind; part of level 4."""
    return COHERENCE * (0.4 + 0.05 * (kinds - 1)) if kinds else 0.0


def measured(shorter: str, longer: str) -> Step:
    """Measure two summaries, the shorter one first."""
    return Step(
        words=(len(shorter.split()), len(longer.split())),
        length_ratio=ratio(len(longer), len(shorter)),
        unique_ratio=ratio(len(set(words(longer))), len(set(words(shorter)))),
        similarity=jaccard(content_words(shorter), content_words(longer)),
        transitions=transition_kinds(longer),
    )


def parts_of(step: Step) -> Mapping[str, float]:
    """Return two summaries' reward by part; levels that are not reached give 0."""
    structure = style = coherence = 0.0
    if all(WORDS[0] <= count <= WORDS[1] for count in step.words):
        structure += 0.5
        length, unique = step.length_ratio, step.unique_ratio
        if length is not None and LENGTH_RATIO[0] <= length <= LENGTH_RATIO[-1]:
            structure += length_score(length)
            if unique is not None and unique >= UNIQUE_RATIO[0]:
                structure += unique_score(unique)
                style = style_score(step.similarity)
                coherence = coherence_score(len(step.transitions))
    return dict(zip(PARTS, (structure, style, coherence), strict=True))


@dataclass(frozen=True, slots=True)
class Summaries:
    """The facts of a score: each summary against the one before it."""

    steps: tuple[Step, ...]


GREATEST = 0.5 + 1.0 + 0.5 + STYLE + coherence_score(len(TRANSITIONS))


class WritingReward(Reward):
    """The rules above over joint actions; ``facts`` of a score are its ``Summaries``."""

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        return [self._score(action.completions_N) for action in actions]

    @staticmethod
    def _score(texts_N: Sequence[str]) -> Score:
        steps = tuple(map(measured, texts_N, texts_N[1:]))
        parts_by_step = [parts_of(step) for step in steps]
        parts = {name: fmean(part[name] for part in parts_by_step) for name in PARTS}
        return Score(sum(parts.values()), parts, facts=Summaries(steps))
