"""What an agent reads at turn 2 and later, and how it is shortened."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from comlrl.tasks.history import Exchange, PromptTooLongError, next_prompt, shorten
from comlrl.tasks.prompts import plain_text
from comlrl.types import Message

PAST = [Exchange("problem\n", "code 1\n"), Exchange("feedback 1\n", "code 2\n")]


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def at_most(characters: int):
    def fits(messages: Sequence[Message]) -> bool:
        return sum(len(m.content) for m in messages) <= characters

    return fits


def test_full_history_is_the_agents_whole_conversation() -> None:
    assert next_prompt(PAST, "feedback 2\n") == (
        user("problem\n"),
        assistant("code 1\n"),
        user("feedback 1\n"),
        assistant("code 2\n"),
        user("feedback 2\n"),
    )


@pytest.mark.parametrize(
    ("original", "previous", "messages"),
    [
        (False, True, (user("Your previous answer:\ncode 2\n\nfeedback 2\n"),)),
        (True, True, (user("problem\n"), assistant("code 2\n"), user("feedback 2\n"))),
        (True, False, (user("problem\n\nfeedback 2\n"),)),
        (False, False, (user("feedback 2\n"),)),
    ],
)
def test_last_shows_what_the_flags_ask_for(
    original: bool, previous: bool, messages: tuple[Message, ...]
) -> None:
    prompt = next_prompt(
        PAST, "feedback 2\n", history="last", original_prompt=original, previous_response=previous
    )
    assert prompt == messages


def test_by_default_last_is_the_previous_response_alone() -> None:
    defaults = next_prompt(PAST, "f\n", history="last")
    assert defaults == next_prompt(
        PAST, "f\n", history="last", original_prompt=False, previous_response=True
    )


def test_an_empty_response_is_shown_as_empty() -> None:
    prompt = next_prompt([Exchange("problem\n", " \n")], "f\n", history="last")
    assert prompt == (user("Your previous answer:\n(empty)\n\nf\n"),)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("history", ["full", "last"])
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("previous", [False, True])
def test_a_conversation_starts_and_ends_with_the_user_and_alternates(
    turns: int, history: str, original: bool, previous: bool
) -> None:
    past = [Exchange(f"u{t}", f"a{t}") for t in range(turns)]
    prompt = next_prompt(
        past, "f", history=history, original_prompt=original, previous_response=previous
    )
    assert [m.role for m in prompt] == [("user", "assistant")[i % 2] for i in range(len(prompt))]
    assert prompt[-1].role == "user"


def test_shortening_drops_whole_turns_from_the_oldest_on() -> None:
    # Characters: 8 + 7 | 11 + 7 | 11; turns of 15 and 18, the newest feedback 11.
    prompt = next_prompt(PAST, "feedback 2\n")
    assert shorten(prompt, at_most(44)) == (prompt, 0)
    assert shorten(prompt, at_most(43)) == (prompt[2:], 1)
    assert shorten(prompt, at_most(29)) == (prompt[2:], 1)


def test_the_newest_response_and_feedback_are_never_cut() -> None:
    # Characters of the newest turn with its prompt: 22 + 7 + 11 = 40; quoted without it:
    # "Your previous answer:\n" 22 + "code 2" 6 + "\n\n" 2 + "feedback 2\n" 11 = 41.
    past = [PAST[0], Exchange("feedback 1, a long one", "code 2\n")]
    prompt = next_prompt(past, "feedback 2\n")
    quoted = (user("Your previous answer:\ncode 2\n\nfeedback 2\n"),)

    def one_message(messages: Sequence[Message]) -> bool:
        return len(messages) == 1

    assert shorten(prompt, one_message) == (quoted, 2)
    # history: last with the original problem: only the problem can go.
    last = next_prompt(past, "feedback 2\n", history="last", original_prompt=True)
    assert shorten(last, one_message) == (quoted, 1)
    with pytest.raises(PromptTooLongError, match=r"agent_model\.max_length"):
        shorten(prompt, at_most(39))


def test_a_first_prompt_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(PromptTooLongError, match="problem"):
        shorten((user("problem"),), at_most(6))


def test_flattened_for_a_base_model() -> None:
    assert plain_text(next_prompt(PAST, "feedback 2\n")) == (
        "problem\n\ncode 1\n\nfeedback 1\n\ncode 2\n\nfeedback 2\n"
    )
