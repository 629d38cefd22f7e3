"""The sources are in the grammar of the oldest Python that is supported."""

from __future__ import annotations

import ast

from tests.support.runs import ROOT

PACKAGES = ("comlrl", "rewards", "external", "loggers", "trainers", "tools", "benchmarks", "tests")


def test_sources_have_the_grammar_of_the_oldest_python():
    for package in PACKAGES:
        files = list((ROOT / package).rglob("*.py"))
        assert files, package
        for file in files:
            text = file.read_text(encoding="utf-8")
            assert isinstance(ast.parse(text, str(file), feature_version=(3, 10)), ast.Module)
