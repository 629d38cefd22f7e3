"""A joint program's reward and the facts behind it."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from comlrl.rewards.sandbox.outcome import TestOutcome

PARTS = (
    "aux_defined",
    "main_defined",
    "syntax",
    "tests",
    "uses_aux",
    "not_wrapper",
    "aux_ignored",
)


@dataclass(frozen=True, slots=True)
class SyntaxProblem:
    """Why the joint program does not compile; line and column are 1-based, in ``program``."""

    message: str
    line: int | None
    column: int | None
    text: str | None = None  # the offending source line


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBreakdown:
    """A joint program's reward, term by term, and the facts behind it.

    The fields named in ``PARTS`` are contributions to ``total`` (``aux_ignored`` is ≤ 0).
    """

    aux_defined: float = 0.0
    main_defined: float = 0.0
    syntax: float = 0.0
    tests: float = 0.0
    uses_aux: float = 0.0
    not_wrapper: float = 0.0
    aux_ignored: float = 0.0
    team: float | None = None  # with ``bonus="team"``, in place of the three terms above
    helpers: tuple[str, ...] = ()  # names that the team was to define: "aux", "aux2", …
    defined: tuple[str, ...] = ()  # of helpers and entry point, those found with a return
    # of each agent whose own function was not found: the functions that its text holds
    instead: tuple[tuple[str, ...], ...] = ()
    called: tuple[str, ...] = ()  # helpers that main calls
    ignored: tuple[str, ...] = ()  # helpers that main calls somewhere without reading the result
    wrapper: bool = False  # main only hands on aux's result
    # helpers and entry point without whose part a test fails, () if one fails anyway; None: not
    # measured
    needed: tuple[str, ...] | None = None
    syntax_error: SyntaxProblem | None = None
    outcomes: tuple[TestOutcome, ...] = ()  # empty where scoring stopped before the tests
    program: str = ""  # preamble + helpers + main, as it was run
    isolation: str = "none"  # what the sandbox used: "bubblewrap", "unshare", "limits"
    seconds: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The terms by name; their sum is the reward."""
        parts = {name: getattr(self, name) for name in PARTS}
        return parts if self.team is None else parts | {"team": self.team}

    @property
    def total(self) -> float:
        return functools.reduce(operator.add, self.parts.values())

    @property
    def passed_all(self) -> bool:
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)

    @property
    def test_fraction(self) -> float:
        """Share of tests passed; 0 where scoring stopped before the tests."""
        return sum(o.passed for o in self.outcomes) / len(self.outcomes) if self.outcomes else 0.0
