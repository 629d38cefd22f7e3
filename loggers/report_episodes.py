"""The sample episodes of a report: which to show, and their code in colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, YamlLexer

from loggers.metrics import roles
from loggers.run_data import Run

SHOWN = 8
_FORMAT = HtmlFormatter(nowrap=True)


@dataclass(frozen=True, slots=True)
class Episode:
    """One task's episode as the page shows it; ``before`` where it was sampled earlier too."""

    sample: dict[str, Any]
    before: dict[str, Any] | None
    roles_N: tuple[str, ...]

    @property
    def parts(self) -> list[tuple[str, float]]:
        parts = self.sample.get("parts", {})
        return [(name.replace("_", " "), value) for name, value in parts.items() if value]

    @property
    def tests_passed(self) -> str:
        outcomes = self.sample.get("outcomes", [])
        if not outcomes:
            return "tests not reached"
        return f"tests {sum(o['passed'] for o in outcomes)}/{len(outcomes)}"


def improved(run: Run) -> list[Episode]:
    """The tasks whose reward rose most between the first and the last evaluation."""
    first, last = run.passes()
    before = {s["task_id"]: s for s in first}
    gains = [
        (s["reward_task_mean"] - before[s["task_id"]]["reward_task_mean"], s)
        for s in last
        if s["task_id"] in before
    ]
    best = sorted((g for g in gains if g[0] > 0), key=lambda g: -g[0])[:SHOWN]
    return [_episode(s, before[s["task_id"]]) for _, s in best]


def failed(run: Run) -> list[Episode]:
    """The tasks of the last evaluation that do not pass their tests, lowest reward first."""
    first, last = run.passes()
    before = {s["task_id"]: s for s in first}
    wrong = [s for s in last if "outcomes" in s and not s["passed_all"]]
    wrong.sort(key=lambda s: s["reward"])
    return [_episode(s, before.get(s["task_id"])) for s in wrong[:SHOWN]]


def _episode(sample: dict[str, Any], before: dict[str, Any] | None) -> Episode:
    return Episode(sample, before, roles(len(sample["completions_N"])))


def python(text: str) -> Markup:
    """Python as HTML spans; what is not Python is shown all the same."""
    return Markup(highlight(text, PythonLexer(stripnl=False), _FORMAT))


def yaml(text: str) -> Markup:
    return Markup(highlight(text, YamlLexer(), _FORMAT))


def code_css(selectors: Sequence[str], style: str) -> Markup:
    """The colours of ``style`` under each selector."""
    formatter = HtmlFormatter(style=style)
    lines = formatter.get_token_style_defs(list(selectors))
    return Markup("\n".join(lines))
