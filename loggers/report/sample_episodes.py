"""The episodes of a report, and the colours of a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import YamlLexer

from comlrl.loggers.report.run_data import Run

_FORMAT = HtmlFormatter(nowrap=True)


@dataclass(frozen=True, slots=True)
class Episode:
    """One task's episode for the page; ``before``: its sample in the first pass, if any."""

    sample: dict[str, Any]
    before: dict[str, Any] | None
    answer: int = 1  # number of the answer, if tasks are answered several times

    @property
    def gain(self) -> float:
        """Return the change in reward since the first pass; 0 without an earlier sample."""
        if self.before is None:
            return 0.0
        return self.sample["reward_task_mean"] - self.before["reward_task_mean"]

    @property
    def passed(self) -> bool | None:
        """Return whether the episode passed; None if the reward has no pass criterion."""
        return self.sample.get("passed")

    @property
    def parts(self) -> list[tuple[str, float]]:
        parts = self.sample.get("parts", {})
        return [(name.replace("_", " "), value) for name, value in parts.items() if value]


def episodes(run: Run) -> list[Episode]:
    """Return the episodes of the last evaluation (or training), largest gains first."""
    first, last = run.passes()
    before = dict(_numbered(first))
    pairs = [Episode(sample, before.get(key), key[1]) for key, sample in _numbered(last)]
    return sorted(pairs, key=lambda e: (-e.gain, e.sample["reward_task_mean"]))


def _numbered(samples: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield ((task, number of the answer from 1), sample)."""
    seen: Counter[str] = Counter()
    for sample in samples:
        seen[sample["task_id"]] += 1
        yield (sample["task_id"], seen[sample["task_id"]]), sample


def yaml(text: str) -> Markup:
    return Markup(highlight(text, YamlLexer(), _FORMAT))


def code_css(selectors: Sequence[str], style: str) -> Markup:
    """Return the colours of ``style`` under each selector, without red frames around non-code."""
    formatter = HtmlFormatter(style=style)
    lines = formatter.get_token_style_defs(list(selectors))
    return Markup("\n".join(line for line in lines if ".err " not in line))
