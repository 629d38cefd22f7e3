"""README and docs are short and plain: each page has an upper length, and so do its sentences.

Prose is what is neither a table nor code nor a heading. See CONTRIBUTING.md for the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORDS = 2_800  # of a page
MEAN = 18  # words of a sentence, at most
LONG, LONG_SHARE = 30, 0.01  # a sentence above LONG words is long
README_LINES = 120
OPENINGS = r"(?:That|Those)\b|What\b[^?]*\bis\b[^?]*$"  # sentences that turn their subject around
PRIVATE = r"\b(?:said|told|heat(?! map)|kept|earn(?:s|ed)?|lanes|everyone|mend(?:s|ed)?|forth)\b"


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page, each on one line, code spans as one word."""
    text = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.M | re.S)  # fenced blocks
    text = re.sub(r"(?<=\n\n)(?: {4}[^\n]*\n)+", "", text)  # indented blocks
    text = re.sub(r"^ *(?:\||#|!\[|---).*$", "", text, flags=re.M)  # tables, headings, pictures
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links
    text = re.sub(r"`[^`]*`", "x", text)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text):
        line = " ".join(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block).replace("**", "").split())
        if line:
            yield line


def sentences(paragraph: str) -> list[str]:
    """Its sentences; abbreviations and numbers do not end one."""
    joined = re.sub(r"\b(e\.g|i\.e|vs|etc)\.", r"\1", paragraph)
    return re.split(r"(?<=[.?!])[)”\"]*\s+(?=[^a-z\s]|x\b)", joined)


def all_sentences(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [s for paragraph in paragraphs(text) for s in sentences(paragraph)]


def length(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_sentences_are_found() -> None:
    page = "# A b\n\nOne two, `a b. C`. Three [four five](x.md)!\n\n- six 1.5 e.g. seven\n- eight\n"
    page += "\n```python\nnine. Ten\n```\n\n| eleven |\n|---|\n\n    twelve\n\nThat ends.\n"
    found = [s for paragraph in paragraphs(page) for s in sentences(paragraph)]
    assert found == [
        "One two, x.", "Three four five!", "six 1.5 e.g seven", "eight", "That ends.",
    ]  # fmt: skip
    assert [length(s) for s in found] == [3, 3, 4, 1, 2]
    assert re.match(OPENINGS, found[-1]) and not re.match(OPENINGS, "What is this?")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_short(page: Path) -> None:
    assert sum(map(length, all_sentences(page))) <= WORDS


def test_sentences_are_short() -> None:
    found = [s for page in PAGES for s in all_sentences(page)]
    long = [s for s in found if length(s) > LONG]
    assert mean(map(length, found)) <= MEAN
    assert len(long) <= LONG_SHARE * len(found), "\n".join(long)


def test_the_readme_is_for_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_words_and_openings(page: Path) -> None:
    found = all_sentences(page)
    assert [s for s in found if re.match(OPENINGS, s)] == []
    assert [s for s in found if re.search(PRIVATE, s)] == []
