"""Measures of a joint program besides its reward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.conventions import convention, expected_convention
from comlrl.rewards.code.prompt_templates import helper_names
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.types import Conventions, JointAction

MAX_TEXT = 20_000  # characters of a program that are recorded


def measures(breakdown: RewardBreakdown, entry_point: str) -> dict[str, float]:
    """Return a program's measures; those that begin with ``aux_`` are shares of the helpers."""
    values = {
        "test_fraction": breakdown.test_fraction,
        "syntax_rate": float(breakdown.syntax > 0),
        "main_defined_rate": float(entry_point in breakdown.defined),
        "timeout_rate": float(any(outcome.timed_out for outcome in breakdown.outcomes)),
        "reward_seconds_mean": breakdown.seconds,
        "unsolved_reward_mean": 0.0 if breakdown.passed_all else breakdown.total,
    }
    if not breakdown.helpers:
        return values
    if breakdown.needed is not None:
        names = (*breakdown.helpers, entry_point)
        values["teamwork_rate"] = float(set(breakdown.needed) == set(names))
        if breakdown.passed_all:
            values |= {
                f"agent_{i}/needed_rate": float(n in breakdown.needed) for i, n in enumerate(names)
            }
    return values | {
        "aux_defined_rate": _share(breakdown, breakdown.defined),
        "aux_called_rate": _share(breakdown, breakdown.called),
        "aux_ignored_rate": _share(breakdown, breakdown.ignored),
        "wrapper_rate": float(breakdown.wrapper),
    }


def conventions(action: JointAction) -> Conventions | None:
    """Return the convention of each helper and the one that main expects of aux.

    Returns None if the row is not CoopMini's (has no ``stages``) or there are no helpers.
    """
    fields, texts_N = action.task.fields, action.completions_N
    if "stages" not in fields or len(texts_N) == 1:
        return None
    named = zip(texts_N[:-1], helper_names(len(texts_N)), strict=True)
    followed = [convention(text, name) for text, name in named]
    expected = expected_convention(texts_N[-1], fields["entry_point"], fields["stages"])
    return Conventions((*followed, expected), expected is not None and expected == followed[0])


def described(breakdown: RewardBreakdown) -> dict[str, Any]:
    """Return a JSON-serializable summary of the breakdown."""
    problem = breakdown.syntax_error
    return {
        "called": list(breakdown.called),
        "ignored": list(breakdown.ignored),
        "wrapper": breakdown.wrapper,
        "lazy": _lazy(breakdown),
        "syntax_error": problem and f"line {problem.line}: {problem.message}",
        "outcomes": [_outcome(outcome) for outcome in breakdown.outcomes],
        "program": breakdown.program[:MAX_TEXT],
    }


def _lazy(breakdown: RewardBreakdown) -> list[str] | None:
    """Return the roles without whose part the program still passes; None if not measured."""
    if breakdown.needed is None or not breakdown.passed_all:
        return None
    lazy = [name for name in breakdown.helpers if name not in breakdown.needed]
    return lazy if set(breakdown.needed) - set(breakdown.helpers) else [*lazy, "main"]


def _outcome(outcome: TestOutcome) -> dict[str, Any]:
    return {
        "source": outcome.source[:2000],
        "passed": outcome.passed,
        "error_type": outcome.error_type,
        "message": outcome.message and outcome.message[:500],
        "expected": outcome.expected,
        "actual": outcome.actual,
        "timed_out": outcome.timed_out,
    }


def _share(breakdown: RewardBreakdown, named: Iterable[str]) -> float:
    return len(set(breakdown.helpers) & set(named)) / len(breakdown.helpers)
