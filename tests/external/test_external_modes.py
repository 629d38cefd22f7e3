"""How a mode is chosen, and ``plain``, which every domain has."""

from __future__ import annotations

import pytest

from comlrl import external
from comlrl.config.sections import ExternalConfig
from comlrl.errors import UserError
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.domain import CODE
from comlrl.rewards.code.modes import LevelFeedback
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, Score
from tests.support.fakes import task

PROMPTS = Prompts(CODE)


def attempt(agents: int) -> Attempt:
    return Attempt(task(), tuple(f"text {i} of an agent" for i in range(agents)), Score(0.0), 1)


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^external\.mode: 'loud' .*level_feedback.*plain"):
        external.find(ExternalConfig(mode="loud"), CODE).build(PROMPTS)


def test_no_mode_is_the_domains_first() -> None:
    made = external.find(ExternalConfig(mode=None, sandbox_slice=-2), CODE).build(PROMPTS)
    assert isinstance(made, LevelFeedback) and made.sandbox_slice == -2


@pytest.mark.parametrize(
    ("history", "previous", "restated"),
    [("full", True, 0), ("full", False, 0), ("last", True, 0), ("last", False, 1)],
)
def test_plain_restates_the_attempt_where_the_prompt_does_not_show_it(
    history: str, previous: bool, restated: int
) -> None:
    section = ExternalConfig(mode="plain", history=history, previous_response=previous)  # type: ignore[arg-type]
    (texts,) = external.find(section, CODE).build(PROMPTS)([attempt(3)])
    for number, text in enumerate(texts):
        assert text.count(f"text {number} of an agent") == restated
        assert text.count("of an agent") == restated


def test_the_users_own_revision_ends_every_text() -> None:
    prompts = Prompts(CODE, {"revision": "Again, `{name}` of `{entry_point}`!"})
    ends = ("Again, `aux` of `f`!", "Again, `f` of `f`!")
    plain = external.find(ExternalConfig(mode="plain"), prompts.domain).build(prompts)
    assert plain([attempt(2)]) == [ends]
    scored = Attempt(task(), ("", ""), Score(0.0, facts=RewardBreakdown()), 1)
    for mode in CODE.modes():
        (texts,) = external.find(ExternalConfig(mode=mode), prompts.domain).build(prompts)([scored])
        for text, end in zip(texts, ends, strict=True):
            assert text.startswith("Feedback:\n") and text.endswith(f"\n{end}")
