"""What came of one test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One test statement of ``check``, run against a joint program. Values are shortened reprs."""

    __test__ = False  # not a pytest class

    source: str
    passed: bool
    error_type: str | None = None  # "AssertionError", "TypeError", "Timeout", "Unsupported", …
    message: str | None = None
    line: int | None = None  # line of the joint program where the error was raised, 1-based
    expected: str | None = None
    actual: str | None = None
    timed_out: bool = False
    seconds: float = 0.0
