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
    """One task's episode as the page shows it; ``before`` where it was sampled earlier too."""

    sample: dict[str, Any]
    before: dict[str, Any] | None
    answer: int = 1  # which one, where tasks are answered several times

    @property
    def gain(self) -> float:
        """Reward since the first evaluation; 0 where there is nothing to compare with."""
        if self.before is None:
            return 0.0
        return self.sample["reward_task_mean"] - self.before["reward_task_mean"]

    @property
    def passed(self) -> bool | None:
        """None where the reward has no notion of it."""
        return self.sample.get("passed")

    @property
    def parts(self) -> list[tuple[str, float]]:
        parts = self.sample.get("parts", {})
        return [(name.replace("_", " "), value) for name, value in parts.items() if value]


def episodes(run: Run) -> list[Episode]:
    """Return all of the last evaluation (or training), those that gained most first."""
    first, last = run.passes()
    before = dict(_numbered(first))
    pairs = [Episode(sample, before.get(key), key[1]) for key, sample in _numbered(last)]
    return sorted(pairs, key=lambda e: (-e.gain, e.sample["reward_task_mean"]))


def _numbered(samples: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield ((task, 1, 2, … of its answers), sample)."""
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
