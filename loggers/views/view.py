"""Views: how console, tables, pictures, report and model card show a domain's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from markupsafe import Markup, escape

from comlrl.evaluation.metrics import measures


class Metric(NamedTuple):
    """A metric and the title under which it is shown."""

    title: str
    name: str


@dataclass(frozen=True, slots=True)
class Lines:
    """One chart, with a line for each listed metric that a run has."""

    title: str
    metrics: tuple[Metric, ...]
    phase: Literal["train", "eval"] = "train"
    percent: bool = True


def plain(text: str) -> Markup:
    """Escape an agent's text for HTML."""
    return escape(text)


def judged(sample: Mapping[str, Any]) -> str:
    """Return whether an episode passed, in words; empty if its reward has no pass criterion."""
    return {True: "passed", False: "not passed"}.get(sample.get("passed"), "")  # type: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A domain's terms and measures. If a field of measures is None, all of them are shown."""

    passed: str = "passed"  # title of the pass rate
    outcome: str = "outcome"  # label of the episode filter, if episodes can pass
    judged: Callable[[Mapping[str, Any]], str] = judged  # label of a sample
    text: Callable[[str], Markup] = plain  # renders agents' texts as HTML
    facts: str = "plain_facts.html"  # template with the macros ``style`` and ``facts``
    console: tuple[tuple[str, str, str], ...] = ()  # (heading, metric, format)
    samples: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (  # columns in W&B
        ("outcome", judged),
    )
    charts: tuple[Lines, ...] | None = None
    note: str = "Means over joint actions."  # above the charts
    agreement: str = "Which way of sharing the work each agent follows."  # above the conventions
    curves: tuple[str, tuple[Metric, ...] | None] = ("Shares of joint actions", None)
    compared: tuple[Metric, ...] | None = None  # shares in comparisons of runs
    tables: tuple[str, ...] | None = None  # measures in evaluation tables and model cards
    crossed: tuple[str, ...] | None = None  # measures in cross-play
    work: str = "work together"  # model card: agents that …
    caution: str = ""
    tags: tuple[str, ...] = ()


def listed(metrics: Iterable[str] | None, names: Iterable[str]) -> list[str]:
    """Return the view's metrics that occur in ``names``; None: all measures."""
    there = dict.fromkeys(names)
    return [name for name in (measures(there) if metrics is None else metrics) if name in there]


def titled(metrics: Iterable[Metric] | None, names: Iterable[str]) -> list[Metric]:
    """Return the metrics that occur in ``names``, with titles; None: all measures."""
    there = dict.fromkeys(names)
    if metrics is None:
        return [Metric(in_words(name), name) for name in measures(there)]
    return [metric for metric in metrics if metric.name in there]


def in_words(name: str) -> str:
    """Convert a metric's name to words: ``pairs: first share`` for ``pairs/first_share``."""
    return name.replace("_", " ").replace("/", ": ")
