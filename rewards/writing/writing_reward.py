"""The rule-based reward of summaries: lengths, vocabulary and transition words.

The levels, ranges and weights are those of the code published with MAGRPO (arXiv 2508.04652) for
`trl-lib/tldr`, with two agents. For each summary and the longer one that follows it:

| level | part | value | next level if |
|---|---|---|---|
| 1 | structure | +0.5 if both have 8 to 256 words | both do |
| 2 | structure | up to +1.0: ratio of their characters, in full from 1.6 to 3.2 | 1.1 to 5.0 |
| 3 | structure | up to +0.5: ratio of their distinct words, in full from 2.0 | at least 1.3 |
| 4 | style | up to +0.6: Jaccard similarity of their content words, in full from 0.03 | |
| 4 | coherence | +0.16 for one kind of transition word in the longer, +0.02 per further kind | |

Outside these ranges the terms fall linearly to 0. The maximum is 2.98, because there are twelve
kinds (published as 3.0). Three things differ from the published code: transition words match only
as whole words (``words.py``), two texts without content words have similarity 0 (published: 1), and
a team of more than two agents earns the mean over neighboring summaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from comlrl.rewards.writing.words import TRANSITIONS, content_words, transition_kinds, words
from comlrl.types import JointAction, Reward, Score

WORDS = (8, 256)  # of a summary
LENGTH_RATIO = (1.1, 1.6, 3.2, 5.0)  # 0 below the first and above the last, full in the middle
UNIQUE_RATIO = (1.3, 2.0)  # 0 below the first, full from the second on
SIMILARITY = 0.03  # full from here on
STYLE, COHERENCE = 0.6, 0.4  # weights of level 4
PARTS = ("structure", "style", "coherence")


@dataclass(frozen=True, slots=True)
class Step:
    """Measurements of a summary and the shorter one before it, including levels not reached."""

    words: tuple[int, int]  # whitespace-separated words of the shorter and the longer one
    length_ratio: float | None  # characters, longer / shorter; None if the shorter one is empty
    unique_ratio: float | None  # distinct words, longer / shorter; None if the shorter has none
    similarity: float
    transitions: tuple[str, ...]  # kinds of transition words in the longer one


def ratio(longer: int, shorter: int) -> float | None:
    """Return longer / shorter, in [0, ∞); None if shorter is 0."""
    return longer / shorter if shorter else None


def ramp(value: float, nothing: float, everything: float) -> float:
    """Return (value − nothing) / (everything − nothing), in [0, 1]; ``nothing`` may be larger."""
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
    """Return 0.4 · (0.4 + 0.05 (kinds − 1)), or 0 for no kind, in [0, 0.38]; part of level 4."""
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
    """Return the reward of two summaries by part; levels that are not reached add nothing."""
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
    """The facts of a score: a comparison of each summary with the one before it."""

    steps: tuple[Step, ...]


GREATEST = 0.5 + 1.0 + 0.5 + STYLE + coherence_score(len(TRANSITIONS))


class WritingReward(Reward):
    """Scores joint actions by the rules above; a score's ``facts`` are ``Summaries``."""

    def score(self, actions: Sequence[JointAction]) -> list[Score]:
        return [self._score(action.completions_N) for action in actions]

    @staticmethod
    def _score(texts_N: Sequence[str]) -> Score:
        steps = tuple(map(measured, texts_N, texts_N[1:]))
        parts_by_step = [parts_of(step) for step in steps]
        parts = {name: fmean(part[name] for part in parts_by_step) for name in PARTS}
        return Score(sum(parts.values()), parts, facts=Summaries(steps))
