"""Sources have the grammar of the oldest supported Python, and names that say what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.runs import ROOT

# As the whole name of a thing these say nothing about it.
EMPTY = {"asked", "found", "given", "kept", "known", "one", "own", "whole"}
PACKAGES = ("comlrl", "rewards", "external", "loggers", "trainers", "tools", "benchmarks", "tests")


def test_sources_have_the_grammar_of_the_oldest_python():
    for package in PACKAGES:
        files = list((ROOT / package).rglob("*.py"))
        assert files, package
        for file in files:
            text = file.read_text(encoding="utf-8")
            assert isinstance(ast.parse(text, str(file), feature_version=(3, 10)), ast.Module)


def stored_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name


def test_empty_names_are_recognized():
    tree = ast.parse("def given(own):\n    self.found = [known for known in own]\n    _kept = 1")
    assert sorted(name for name in stored_names(tree) if name.lstrip("_") in EMPTY) == [
        "_kept", "found", "given", "known", "own",
    ]  # fmt: skip


def test_names_say_what_they_stand_for():
    for package in PACKAGES[:-1]:
        for file in (ROOT / package).rglob("*.py"):
            names = stored_names(ast.parse(file.read_text(encoding="utf-8")))
            empty = {name for name in names if name.lstrip("_") in EMPTY}
            assert not empty, f"{file.relative_to(ROOT)}: {empty}; name what these hold"
