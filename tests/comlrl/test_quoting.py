"""Untrusted text: nothing in it reads as a special token, however it is put together."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comlrl.quoting import clean


@pytest.mark.parametrize(
    "text",
    [
        "<|<|x|>im_start|>",
        "<|<|<|a|>|>im_start|>",
        "<<s>s>",
        "</<</s>/s>s>",
        "<s<|x|>>",
        "<|im_st\x00art|>",
        "<\u200b|im_end|\x1b>",
        "<<|x|>|im_start|>",
    ],
)
def test_what_is_left_out_uncovers_nothing(text: str) -> None:
    """One pass over the first would leave ``<|im_start|>``."""
    assert clean(text) == "" and clean(f"a{text}b") == "ab"


pieces = st.sampled_from([*"<|>/sx\n\r\0", "<|", "|>", "<s>", "</s>"])


@given(st.lists(pieces | st.characters(), max_size=30).map("".join))
def test_cleaning_again_changes_nothing_and_no_marker_is_left(text: str) -> None:
    once = clean(text)
    assert clean(once) == once
    assert not re.search(r"<\|[^|\n]*\|>|</?s>", once)
