"""The view of runs of the code domain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from comlrl.loggers.views.view import Lines, Metric, View

_FORMAT = HtmlFormatter(nowrap=True)
_FENCED = re.compile(r"^(```[^\n]*\n)(.*?)(^```[^\n]*\n?|\Z)", re.DOTALL | re.MULTILINE)


def python(text: str) -> Markup:
    """Return Python as HTML spans; for text with Markdown fences, only the fenced code."""
    shown, end = Markup(), 0
    for fenced in _FENCED.finditer(text):
        opening, code, closing = fenced.groups()
        words = Markup('<span class="words">{}</span>')
        shown += words.format(text[end : fenced.start()] + opening)
        shown += _coloured(code) + words.format(closing)
        end = fenced.end()
    if not end:
        return _coloured(text)
    return shown + Markup('<span class="words">{}</span>').format(text[end:])


def _coloured(code: str) -> Markup:
    # Strip trailing white space, as Pygments takes quadratic time in the length of a run of it.
    code = "\n".join(line.rstrip() for line in code.split("\n"))
    return Markup(highlight(code, PythonLexer(stripnl=False, ensurenl=False), _FORMAT))


def _outcomes(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    return sample.get("facts", {}).get("outcomes", [])


def tests_passed(sample: Mapping[str, Any]) -> str:
    outcomes = _outcomes(sample)
    if not outcomes:
        return "tests not reached"
    return f"tests {sum(o['passed'] for o in outcomes)}/{len(outcomes)}"


# The share of solved programs that fail without an agent's part, by agent; main is last. Metrics
# that a run lacks are not shown, so the range may exceed any team.
NEEDED = tuple(Metric(f"agent {i} needed", f"agent_{i}/needed_rate") for i in range(64))

CODE = View(
    passed="all tests pass",
    outcome="tests",
    judged=tests_passed,
    text=python,
    facts="code_facts.html",
    console=(("tests", "test_fraction", "{:.0%}"), ("aux used", "aux_called_rate", "{:.0%}")),
    samples=(
        ("program", lambda sample: sample.get("facts", {}).get("program", "")),
        ("tests passed", lambda sample: tests_passed(sample).removeprefix("tests ")),
    ),
    charts=(
        Lines(
            "How main uses aux",
            (
                Metric("called by main", "aux_called_rate"),
                Metric("thin wrapper", "wrapper_rate"),
                Metric("result ignored", "aux_ignored_rate"),
            ),
        ),
        Lines(
            "Teamwork, held-out tasks",
            (
                Metric("all tests pass", "pass_rate"),
                Metric("all tests pass, every agent needed", "teamwork_rate"),
                *NEEDED,
            ),
            phase="eval",
        ),
        Lines(
            "Reward without all tests passed",
            (Metric("mean over all joint actions", "unsolved_reward_mean"),),
            percent=False,
        ),
        Lines(
            "The code",
            (
                Metric("all tests pass", "pass_rate"),
                Metric("tests passed", "test_fraction"),
                Metric("compiles", "syntax_rate"),
                Metric("main defined", "main_defined_rate"),
                Metric("aux defined", "aux_defined_rate"),
                Metric("times out", "timeout_rate"),
            ),
        ),
    ),
    note="Shares of all joint actions of a training step.",
    agreement="Which way of sharing the work each agent follows, read from the syntax tree of its "
    "code. The agents cannot talk; only matching conventions score.",
    curves=(
        "Share of programs",
        (
            Metric("all tests pass", "pass_rate"),
            Metric("compiles", "syntax_rate"),
            Metric("aux called", "aux_called_rate"),
            Metric("every agent needed", "teamwork_rate"),
            Metric("thin wrapper", "wrapper_rate"),
        ),
    ),
    compared=(
        Metric("Main calls aux", "aux_called_rate"),
        Metric("Teamwork", "teamwork_rate"),
        Metric("Thin wrappers", "wrapper_rate"),
    ),
    tables=(
        "test_fraction",
        "syntax_rate",
        "aux_called_rate",
        "teamwork_rate",
        *(metric.name for metric in NEEDED),
        "wrapper_rate",
        "aux_ignored_rate",
    ),
    crossed=("test_fraction",),
    work="solve a programming task together: helpers write functions that main calls",
    caution="What the agents write is code from a language model: run it in a sandbox only.",
    tags=("code",),
)
