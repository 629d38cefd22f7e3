"""The outcome of one test, as the judge reports it."""

from __future__ import annotations

from collections.abc import Sequence
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
    entered: Sequence[str] = ()  # helpers called so far, as reported by the program

    def __post_init__(self) -> None:
        """Replace lone surrogates, which cannot be encoded, with "?"; programs may send them."""
        for name in ("source", "error_type", "message", "expected", "actual"):
            text = getattr(self, name)
            if text is not None and not text.isascii():
                object.__setattr__(self, name, text.encode("utf-8", "replace").decode("utf-8"))
