"""Views of a domain's runs, in console, tables, pictures, report and model card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from markupsafe import Markup, escape

from comlrl.evaluation.metrics import measures


class Metric(NamedTuple):
    """A metric under the name that a reader sees."""

    title: str
    name: str


@dataclass(frozen=True, slots=True)
class Lines:
    """One chart: a line for each metric that a run has."""

    title: str
    metrics: tuple[Metric, ...]
    phase: Literal["train", "eval"] = "train"
    percent: bool = True


def plain(text: str) -> Markup:
    """Return an agent's text as HTML, unchanged."""
    return escape(text)


def judged(sample: Mapping[str, Any]) -> str:
    """Return whether an episode passed, in words; empty if its reward has no pass criterion."""
    return {True: "passed", False: "not passed"}.get(sample.get("passed"), "")  # type: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A domain's terms and measures. Where measures are None, all of a run's are shown."""

    passed: str = "passed"  # title of the pass rate
    outcome: str = "outcome"  # what a reader chooses episodes by, where they can pass
    judged: Callable[[Mapping[str, Any]], str] = judged  # a sample's chip
    text: Callable[[str], Markup] = plain  # what agents read and write, as HTML
    facts: str = "plain_facts.html"  # template: macros ``style`` and ``facts``, of a sample
    console: tuple[tuple[str, str, str], ...] = ()  # (heading, metric, format)
    samples: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (  # columns in W&B
        ("outcome", judged),
    )
    charts: tuple[Lines, ...] | None = None
    note: str = "Means over joint actions."  # above the charts
    agreement: str = "Which way of sharing the work each agent follows."  # above the conventions
    curves: tuple[str, tuple[Metric, ...] | None] = ("Shares of joint actions", None)
    compared: tuple[Metric, ...] | None = None  # shares
    tables: tuple[str, ...] | None = None  # of evaluations and model cards
    crossed: tuple[str, ...] | None = None  # in cross-play
    work: str = "work together"  # model card: agents that …
    caution: str = ""
    tags: tuple[str, ...] = ()


def listed(metrics: Iterable[str] | None, names: Iterable[str]) -> list[str]:
    """Return those of a view's metrics that exist; for any domain, all measures."""
    there = dict.fromkeys(names)
    return [name for name in (measures(there) if metrics is None else metrics) if name in there]


def titled(metrics: Iterable[Metric] | None, names: Iterable[str]) -> list[Metric]:
    """Return the listed metrics with their titles."""
    there = dict.fromkeys(names)
    if metrics is None:
        return [Metric(in_words(name), name) for name in measures(there)]
    return [metric for metric in metrics if metric.name in there]


def in_words(name: str) -> str:
    """Return ``pairs: first share`` for ``pairs/first_share``."""
    return name.replace("_", " ").replace("/", ": ")
