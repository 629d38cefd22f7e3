"""What is run of an answer is what a person takes as the answer: each by hand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from comlrl.rewards.code.joint_program import contribution

ANSWERS = Path(__file__).with_name("answers.txt").read_text(encoding="utf-8")


def read() -> list[tuple[str, str, str]]:
    parts = re.split(r"^#### (\w+)\n", ANSWERS, flags=re.MULTILINE)[1:]
    answers = []
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        text, _, expected = body.partition("==>\n")
        answers.append((name, text.removesuffix("\n").replace("␍", "\r"), expected.strip("\n")))
    return answers


def plain(source: str) -> str:
    """Without blank lines, comments and quoting that mean nothing; unfinished text as it is."""
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:
        return "\n".join(line for line in source.split("\n") if line.strip())


def cases() -> list:
    return [pytest.param(*answer, id=str(i)) for i, answer in enumerate(read())]


@pytest.mark.parametrize(("name", "text", "expected"), cases())
def test_what_is_run_is_what_a_person_takes(name, text, expected):
    found = contribution(text, name, ("aux", name))
    run = "" if found is None else "\n".join([*found.imports, found.source])
    assert plain(run) == plain(expected)


def test_the_file_is_read_whole():
    assert len(read()) == 72
