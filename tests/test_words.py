"""Private words that are gone for good from the names of the code, its comments and messages."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("comlrl", "trainers", "loggers", "external", "rewards", "benchmarks", "tools", "tests")
# Whole names, and words that a name may not hold (``said_U``, ``_told``).
GONE = {
    "heat", "Kept", "max_kept", "everyone", "Course", "side_by_side", "Remembering", "Corrected",
    "earned", "lanes", "Before", "cards",
}  # fmt: skip
WORDS_GONE = {"said", "told"}
# In comments, docstrings, messages and configurations. "Of its own" stays in the texts that models
# read, because their words decide what is sampled.
PHRASES_GONE = re.compile(
    r"\bforth and back|\bback and forth|\bmend(?:s|ed)?\b|\bjoint actions? go(?:es)? on\b"
    r"|\b(?:a|per|each|every) card\b"
    r"|(?<!\bline )(?<!\bwork )\bof (?:its|their|one's) own\b(?! agents)"
)


def names(node: ast.AST) -> Iterator[str]:
    """What a node of the syntax tree names: variables, arguments, functions, imports, fields."""
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        if isinstance(name := getattr(node, field, None), str):
            yield from name.split(".")


def gone(source: str) -> list[tuple[int, str]]:
    """Line and name of each private word in a file."""
    found = {
        (getattr(node, "lineno", 0), name)
        for node in ast.walk(ast.parse(source))
        for name in names(node)
        if name in GONE or WORDS_GONE & set(name.lower().split("_"))
    }
    return sorted(found)


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the comments and strings of a Python file, or of the lines of another."""
    if file.suffix != ".py":
        yield from enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        return
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string


def test_private_words_are_found() -> None:
    source = "import a.heat as told\ndef f(said_U, *, kept): x.lanes = _said()\nf(max_kept=1)\n"
    source += "class Kept: 'said'\nunsaid, heat_map, earned_C = 'lanes', 'told', None\n"
    assert gone(source) == [
        (1, "heat"), (1, "told"), (2, "_said"), (2, "lanes"), (2, "said_U"), (3, "max_kept"),
        (4, "Kept"),
    ]  # fmt: skip


def test_no_private_word_is_left_in_the_code() -> None:
    files = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
    offenders = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in (*files, *sorted(ROOT.glob("*.py")))
        for line, name in gone(file.read_text(encoding="utf-8"))
    ]
    assert not offenders, "\n".join(offenders)


def test_no_private_phrase_is_left_in_comments_messages_and_configurations() -> None:
    files = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
    offenders = [
        f"{file.relative_to(ROOT)}:{line} {match[0]}"
        for file in (*files, *sorted((ROOT / "configs").rglob("*.yaml")))
        if file.name not in ("test_words.py", "test_prose.py")  # which name them
        for line, text in texts(file)
        if (match := PHRASES_GONE.search(" ".join(text.split())))
    ]
    assert not offenders, "\n".join(offenders)
