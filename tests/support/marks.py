"""Which cases of a test are left to the slow suite."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def some_slow(cases: Iterable[str], *slow: str) -> list[str | ParameterSet]:
    """The cases as parameters, those in ``slow`` marked as slow."""
    listed = list(cases)
    assert set(slow) <= set(listed), slow
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in listed]
