"""Describes the reward's breakdown in words, for the modes with diagnostics.

Nothing is run here: all facts come from the ``RewardBreakdown`` that the reward returned for the
attempt.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from comlrl.errors import UserError
from comlrl.quoting import clean, cut
from comlrl.rewards.code.analysis.parsing import first_line, parse
from comlrl.rewards.code.breakdown import RewardBreakdown
from comlrl.rewards.code.prompt_templates import helper_names
from comlrl.rewards.sandbox.outcome import TestOutcome
from comlrl.types import Attempt

MAX_PROGRAM = 1 << 20  # bytes of a program in which lines are looked up
MAX_SOURCE = 400  # characters of a test that are shown
MAX_MESSAGE = 200  # characters of an error message that are shown
MAX_NAMES, MAX_NAME = 3, 40  # functions listed as written instead, and characters of a name
# A line that begins a function (whose name is captured), a class or a constant of the program.
_TOP = re.compile(
    r"(?:async\s+)?def\s+(\w+)|class\s"
    r"|[^\W\d][\w.]{0,99}(?:\[[^\n]{0,99}\])?\s{0,9}(?::[^=]{1,99})?=[^=]"
)


@dataclass(frozen=True, slots=True)
class Levels:
    """The results of an attempt by level; None for a level that was not reached."""

    definitions: bool  # every agent's function is defined
    syntax: bool | None
    tests: tuple[int, int] | None  # (passed, total) of the surfaced tests
    use: bool | None  # main calls every helper, reads its result, and does its own work

    @property
    def all_passed(self) -> bool:
        passed, shown = self.tests or (0, 0)
        return self.definitions and bool(self.syntax) and 0 < passed == shown and bool(self.use)


def checked_slice(value: int | str | None) -> int | None:
    """Convert ``external.sandbox_slice`` to the n of ``surfaced``.

    0, null and 'all' become None (every test). Raises UserError if the value is invalid.
    """
    if value is None or value == "all" or (value == 0 and not isinstance(value, bool)):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise UserError(
        f"external.sandbox_slice: {value!r} is not a whole number; use n > 0 (first n tests), "
        "n < 0 (last |n|), or 0, null or 'all' (every test)"
    )


def surfaced(
    outcomes: Sequence[TestOutcome], sandbox_slice: int | str | None = 1
) -> tuple[TestOutcome, ...]:
    """Return the outcomes that feedback may show: the first n, the last |n| (n < 0), or all."""
    n = checked_slice(sandbox_slice)
    if n is None:
        return tuple(outcomes)
    return tuple(outcomes[:n] if n > 0 else outcomes[n:])


def agent_names(attempt: Attempt) -> tuple[str, ...]:
    """Return the name of each agent's function: ``aux``, ``aux2``, … and last the entry point."""
    return (*helper_names(len(attempt.completions_N)), attempt.task.fields["entry_point"])


def breakdown_of(attempt: Attempt) -> RewardBreakdown:
    """Return the attempt's breakdown. Raises UserError if the reward does not provide one."""
    if not isinstance(attempt.score.facts, RewardBreakdown):
        raise UserError(
            "external.mode: modes with diagnostics need a reward that runs the code, and this one "
            "returns no breakdown; set external.mode to 'plain' or 'expert_edits'"
        )
    return attempt.score.facts


def levels(attempt: Attempt, sandbox_slice: int | str | None) -> Levels:
    """Return the result of each level, counting only the surfaced tests.

    Use of helpers is judged from the program. Unlike the reward's bonus, it needs no passed test.
    """
    facts, names = breakdown_of(attempt), agent_names(attempt)
    definitions = all(name in facts.defined for name in names)
    if names[-1] not in facts.defined:
        return Levels(definitions, None, None, None)
    if facts.syntax_error is not None:
        return Levels(definitions, False, None, None)
    shown = surfaced(facts.outcomes, sandbox_slice)
    passed = sum(outcome.passed for outcome in shown)
    read = (set(facts.called) & set(facts.defined)) - set(facts.ignored)
    used = read >= set(names[:-1]) and not facts.wrapper
    return Levels(definitions, True, (passed, len(shown)), used)


def diagnostics(attempt: Attempt, agent: int, sandbox_slice: int | str | None) -> str:
    """Describe the results of a joint program to the agent with index ``agent``.

    Line numbers in errors count from the function's ``def`` line. The line itself is quoted only to
    the agent that wrote it.
    """
    facts, names = breakdown_of(attempt), agent_names(attempt)
    lines = [_definitions(facts, names, agent)]
    if names[-1] not in facts.defined:
        return lines[0]
    if facts.syntax_error is not None:
        return clean(f"{lines[0]}\n{_syntax_error(facts, names, reader=names[agent])}")
    lines[0] += " Syntax: valid."
    lines += [_test(outcome, facts, names) for outcome in surfaced(facts.outcomes, sandbox_slice)]
    lines += _usage(facts, names)
    return clean("\n".join(lines))


def _definitions(facts: RewardBreakdown, names: Sequence[str], reader: int) -> str:
    """List the functions found and missing, and what the reader wrote if its own is missing."""
    defined = [name for name in names if name in facts.defined]
    missing = [name for name in names if name not in facts.defined]
    parts = [f"Defined: {_listed(defined)}."] if defined else []
    if missing:
        parts.append(f"Missing (a `def` with a return): {_listed(missing)}.")
    if names[reader] in missing and facts.instead:
        parts.append(_instead(facts.instead[reader], names, reader))
    return " ".join(parts)


def _instead(written: Sequence[str], names: Sequence[str], reader: int) -> str:
    """Describe what the reader wrote instead of its function ``names[reader]``."""
    name = names[reader]
    if name in written:
        return f"Your `{name}` returns nothing."
    theirs = [other for other in names if other in written]
    if theirs:
        work = "the other agent's work" if len(names) == 2 else "the work of others"
        return f"You wrote {_listed(theirs)}, which is {work}."
    shown = [cut(other, MAX_NAME) for other in written[:MAX_NAMES]]
    return f"You wrote {_listed(shown)}." if shown else "You wrote no function."


def _syntax_error(facts: RewardBreakdown, names: Sequence[str], reader: str) -> str:
    problem = facts.syntax_error
    assert problem is not None
    owner, line = _place(facts.program, problem.line, names)
    where = f"`{owner}`" if owner else "the program"
    where += f", line {line}" if line else ""
    where += f", column {problem.column}" if line and problem.column else ""
    # The compiler's own "on line N" counts lines of the joint program, which no agent sees.
    message = re.sub(r" (?:on line \d+|\(detected at line \d+\))", "", problem.message)
    quoted = (problem.text or "").strip() if owner == reader else ""
    return f"Syntax error in {where}: {_line(message)}." + (f"\n{_line(quoted)}" if quoted else "")


def _test(outcome: TestOutcome, facts: RewardBreakdown, names: Sequence[str]) -> str:
    source = re.sub(r"\bcandidate\b", names[-1], outcome.source.strip("\n"))
    source = cut(source, MAX_SOURCE)
    if outcome.passed:
        return f"Passed: {source}"
    return f"Failed: {source}\n{_reason(outcome, facts, names)}"


def _reason(outcome: TestOutcome, facts: RewardBreakdown, names: Sequence[str]) -> str:
    if outcome.timed_out:
        return "Timed out."
    if outcome.error_type in (None, "AssertionError") and outcome.actual is not None:
        wanted = f"Expected {outcome.expected}, got" if outcome.expected is not None else "Got"
        return f"{wanted} {outcome.actual}."
    message = _line(outcome.message or "")
    error = f"{outcome.error_type or 'AssertionError'}{': ' if message else ''}{message}"
    owner, line = _place(facts.program, outcome.line, names)
    return f"{error} (`{owner}`, line {line})." if owner else f"{error}."


def _usage(facts: RewardBreakdown, names: Sequence[str]) -> list[str]:
    """Describe how main uses the defined helpers."""
    helpers = [name for name in names[:-1] if name in facts.defined]
    groups = (
        ("not called", [h for h in helpers if h not in facts.called]),
        ("called, result ignored", [h for h in helpers if h in facts.ignored]),
        ("used", [h for h in helpers if h in facts.called and h not in facts.ignored]),
    )
    lines = [f"{_listed(group)}: {word}." for word, group in groups if group]
    if facts.wrapper:
        lines.append(f"`{names[-1]}` is a thin wrapper: it must do work of its own.")
    return lines


def _place(program: str, line: int | None, names: Sequence[str]) -> tuple[str | None, int | None]:
    """Return (function, line counted from its ``def``) for a line of the joint program.

    Returns (None, line) if the line is in none of the agents' functions.
    """
    if line is None:
        return None, None
    statements = _statements(program)
    if statements is not None:
        for lines, start, owner in statements:
            if line in lines:
                return (owner, line - start + 1) if owner in names else (None, line)
        return None, line
    above = program.split("\n")[:line]
    for number in range(len(above), 0, -1):
        match = _TOP.match(above[number - 1])
        if match:
            owner = match[1]
            return (owner, line - number + 1) if owner in names else (None, line)
    return None, line


@functools.lru_cache(maxsize=8)  # one program fails many tests
def _statements(program: str) -> list[tuple[range, int, str | None]] | None:
    """Return the lines of each of a program's statements, the line of its ``def``, ``class`` or
    first token, and its name if it has one; None if the program does not parse."""
    tree = parse(program, MAX_PROGRAM)
    if tree is None:
        return None
    return [
        (
            range(first_line(node), (node.end_lineno or 0) + 1),
            node.lineno,
            getattr(node, "name", None),
        )
        for node in tree.body
    ]


def _line(message: str) -> str:
    """Return a message on one line, cleaned and truncated, without its final period."""
    return cut(" ".join(clean(message).split()).rstrip("."), MAX_MESSAGE)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
