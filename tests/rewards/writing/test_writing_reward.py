"""The summaries' reward: every term by hand, its edges, and what holds for any texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl.rewards.writing.words import (
    STOPWORDS,
    TRANSITIONS,
    content_words,
    transition_kinds,
    words,
)
from comlrl.rewards.writing.writing_reward import (
    GREATEST,
    PARTS,
    Step,
    WritingReward,
    coherence_score,
    jaccard,
    length_score,
    measured,
    parts_of,
    ratio,
    style_score,
    unique_score,
)
from comlrl.types import JointAction, Score, Task

CONCISE = "The red fox took my shoe, and nobody saw it."  # 10 words, 44 characters
DETAILED = (
    "A red fox came into our yard twice last week. First it took one shoe, but later "
    "it also found gloves, because we forgot to close the door."
)
STEP = Step((10, 20), 2.0, 2.0, 0.03, ("time",))  # full marks but for coherence


def score(*texts: str) -> Score:
    (found,) = WritingReward().score([JointAction(Task("post"), texts)])
    return found


def test_two_summaries_by_hand():
    found = score(CONCISE, DETAILED)
    (step,) = found.facts.steps
    # 9 + 18 words: "A red fox came into our yard twice last week." has 10
    assert step.words == (10, 28)
    assert step.length_ratio == len(DETAILED) / len(CONCISE) == 138 / 44  # 3.14: all of 1.0
    # the 10 words of the first all differ; of the second's 28, "it" stands twice
    assert step.unique_ratio == 27 / 10  # above 2: all of 0.5
    # content: red fox took shoe nobody saw; red fox came yard twice last week first took one shoe
    # later found gloves forgot close door → 4 in common, of 6 + 17 − 4 = 19
    assert content_words(CONCISE) == {"red", "fox", "took", "shoe", "nobody", "saw"}
    assert step.similarity == 4 / 19  # above 0.03: all of 0.6
    # also, because, but, first, later
    assert step.transitions == ("elaboration", "cause_effect", "contrast", "sequence", "time")
    # coherence: 0.4 · (0.4 + 4 · 0.05) = 0.24
    assert found.parts == pytest.approx({"structure": 2.0, "style": 0.6, "coherence": 0.24})
    assert found.value == pytest.approx(2.84)
    assert found.passed is None


@pytest.mark.parametrize(
    ("length_ratio", "expected"),
    # (1.35 − 1.1) / 0.5 = 0.5; (5 − 4.1) / 1.8 = 0.5
    [(1.0, 0), (1.1, 0), (1.35, 0.5), (1.6, 1), (2.4, 1), (3.2, 1), (4.1, 0.5), (5.0, 0), (6, 0)],
)
def test_length(length_ratio, expected):
    assert length_score(length_ratio) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("unique_ratio", "expected"),
    [(1.0, 0), (1.3, 0), (1.65, 0.25), (2.0, 0.5), (9.0, 0.5)],  # 0.5 · 0.35 / 0.7
)
def test_unique_words(unique_ratio, expected):
    assert unique_score(unique_ratio) == pytest.approx(expected)


def test_style_and_coherence():
    assert [style_score(s) for s in (0, 0.015, 0.03, 1)] == pytest.approx([0, 0.3, 0.6, 0.6])
    # 0.4 · 0.4; 0.4 · 0.45; 0.4 · (0.4 + 11 · 0.05) = 0.38
    assert [coherence_score(n) for n in (0, 1, 2, 12)] == pytest.approx([0, 0.16, 0.18, 0.38])
    assert pytest.approx(2.98) == GREATEST and len(TRANSITIONS) == 12


def test_similarity():
    assert jaccard({"a", "b", "c"}, {"b", "c", "d"}) == 2 / 4
    assert jaccard(set(), {"a"}) == jaccard(set(), set()) == 0


@pytest.mark.parametrize(
    ("step", "structure"),
    [
        (STEP, 2.0),
        (Step((7, 20), 2.0, 2.0, 1, ()), 0),  # too short: nothing
        (Step((8, 256), 2.0, 2.0, 1, ()), 2.0),
        (Step((8, 257), 2.0, 2.0, 1, ()), 0),
        (Step((10, 20), 1.09, 2.0, 1, ()), 0.5),  # no longer than the other: level 1 alone
        (Step((10, 20), 5.01, 2.0, 1, ()), 0.5),
        (Step((10, 20), 2.0, 1.29, 1, ("time",)), 1.5),  # nothing new: levels 1 and 2
        (Step((10, 20), 1.1, 1.3, 1, ("time",)), 0.5),  # at the edges: 0, yet one goes on
        (Step((8, 8), None, None, 0, ()), 0.5),
        (Step((8, 8), 2.0, None, 0, ()), 1.5),  # punctuation alone is no word
    ],
)
def test_levels(step, structure):
    parts = parts_of(step)
    assert parts["structure"] == pytest.approx(structure)
    goes_on = step.length_ratio in (1.1, 2.0) and (step.unique_ratio or 0) >= 1.3
    reached = structure >= 0.5 and goes_on
    assert parts["style"] == pytest.approx(0.6 if reached else 0)
    assert parts["coherence"] == pytest.approx(0.16 if reached and step.transitions else 0)


def test_a_team_of_three_earns_the_mean_of_its_neighbours():
    longest = f"{DETAILED} {DETAILED} " + " ".join(f"word{n}" for n in range(40))
    pairs = [score(CONCISE, DETAILED), score(DETAILED, longest)]
    found = score(CONCISE, DETAILED, longest)
    for name in PARTS:
        assert found.parts[name] == pytest.approx(sum(p.parts[name] for p in pairs) / 2)
    assert [step for p in pairs for step in p.facts.steps] == list(found.facts.steps)


def test_texts_without_words():
    assert measured("", "") == Step((0, 0), None, None, 0.0, ())
    assert score("", DETAILED).value == 0
    dots = "… " * 10
    assert measured(dots, DETAILED).unique_ratio is None
    assert score(dots, DETAILED).parts["structure"] <= 1.5
    assert ratio(3, 0) is None and ratio(0, 3) == 0


def test_transition_words_are_whole_words_and_may_run_over_lines():
    assert transition_kinds("Some life, butter and thenar") == ()
    assert transition_kinds("In\n  addition, SO it was") == ("elaboration", "cause_effect")


def test_each_transition_word_is_of_one_kind():
    phrases = [phrase for listed in TRANSITIONS.values() for phrase in listed]
    assert len(set(phrases)) == len(phrases)
    for kind, listed in TRANSITIONS.items():
        assert all(transition_kinds(f"It is {phrase} that.") == (kind,) for phrase in listed)


def test_words():
    assert words("Don't STOP: it's 5 o’clock") == ["don", "t", "stop", "it", "s", "5", "o", "clock"]
    assert content_words("The dog and THE Dog") == {"dog"}
    assert all(word == word.lower() for word in STOPWORDS)


VOCABULARY = ("fox", "red", "the", "so", "later", "ran", "home", "…", "first", "a", "Cat", "\n")
TEXTS = st.lists(st.sampled_from(VOCABULARY), max_size=60).map(" ".join)


@given(st.lists(TEXTS | st.text(max_size=40), min_size=2, max_size=4))
def test_of_any_texts(texts):
    found = score(*texts)
    assert found.value == sum(found.parts.values())
    assert 0 <= found.value <= GREATEST + 1e-9
    assert tuple(found.parts) == PARTS and len(found.facts.steps) == len(texts) - 1
    assert found == score(*texts)
    for part, most in zip(PARTS, (2.0, 0.6, 0.38), strict=True):
        assert 0 <= found.parts[part] <= most + 1e-9


@given(TEXTS)
def test_a_copy_adds_nothing(text):
    assert score(text, text).value in (0, 0.5)  # level 1 at most: its ratio of lengths is 1


@given(TEXTS, TEXTS)
def test_case_and_line_ends_change_nothing(shorter, longer):
    changed = score(shorter.upper(), longer.replace(" ", "\n").upper())
    assert changed.parts == pytest.approx(score(shorter, longer).parts)
