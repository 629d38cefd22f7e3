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
    """The reason why a joint program does not compile; line and column are 1-based."""

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
    helpers: tuple[str, ...] = ()  # the team's helper names: "aux", "aux2", …
    defined: tuple[str, ...] = ()  # helpers and entry point that were found, with a return
    # for each agent, the functions in its text if its required function was not found, else ()
    instead: tuple[tuple[str, ...], ...] = ()
    called: tuple[str, ...] = ()  # helpers that main calls
    ignored: tuple[str, ...] = ()  # helpers that main calls somewhere without reading the result
    wrapper: bool = False  # main only returns aux's result
    # functions (helpers and entry point) without which a test fails; () if one fails anyway, None
    # if not measured
    needed: tuple[str, ...] | None = None
    syntax_error: SyntaxProblem | None = None
    outcomes: tuple[TestOutcome, ...] = ()  # empty where scoring stopped before the tests
    program: str = ""  # preamble + helpers + main, as it was run
    isolation: str = "none"  # the sandbox's level: "bubblewrap", "unshare", "limits"
    seconds: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The reward's terms by name, which sum to ``total``."""
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
        """The share of tests passed; 0 if scoring stopped before the tests."""
        return sum(o.passed for o in self.outcomes) / len(self.outcomes) if self.outcomes else 0.0
