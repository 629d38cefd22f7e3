"""Compiles a task's tests so that an assert records the values that it compares.

Standard library only, because this runs in the tests' process.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from types import CodeType

from comlrl.rewards.sandbox.checks import Statement, parse_check
from comlrl.rewards.sandbox.inside import wire

ACTUAL, EXPECTED = "__actual__", "__expected__"  # variables that record a test's values


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A compiled statement."""

    code: CodeType
    is_test: bool
    in_check: bool
    reads: frozenset[str]
    binds: frozenset[str]
    asks: bool  # it may call the program
    call: bytes | None  # the only call that it makes, if evident from the source


@dataclass(frozen=True, slots=True)
class Suite:
    preamble: Step
    parameter: str
    steps: tuple[Step, ...]
    calls: tuple[tuple[bytes, ...], ...]  # for each step, the calls certain to follow


@functools.lru_cache(maxsize=1024)
def suite(preamble: str, test: str, entry_point: str) -> Suite:
    """Compile a task's tests."""
    check = parse_check(test, entry_point)  # the trainer has checked that it compiles
    under_test = {check.parameter, "candidate", entry_point}
    steps = tuple(_step(statement, under_test) for statement in check.statements)
    code = compile(preamble, "<preamble>", "exec", dont_inherit=True)
    first = Step(
        code=code,
        is_test=False,
        in_check=False,
        reads=frozenset(),
        binds=frozenset(),
        asks=False,
        call=None,
    )
    return Suite(first, check.parameter, steps, _calls_ahead(steps))


def _calls_ahead(steps: tuple[Step, ...]) -> tuple[tuple[bytes, ...], ...]:
    ahead: list[tuple[bytes, ...]] = [()]
    for step in reversed(steps):
        if step.call is not None:
            ahead.append((step.call, *ahead[-1]))
        else:
            ahead.append(() if step.asks else ahead[-1])
    return tuple(reversed(ahead[1:]))


def _step(statement: Statement, under_test: set[str]) -> Step:
    node, call = statement.node, None
    if statement.is_test:
        call = _only_call(node, under_test)
        node = _Recorder(under_test).visit(node)
    return Step(
        code=compile(ast.Module([node], type_ignores=[]), "<check>", "exec", dont_inherit=True),
        is_test=statement.is_test,
        in_check=statement.in_check,
        reads=statement.reads,
        binds=statement.binds,
        asks=statement.is_test or not statement.names.isdisjoint(under_test),
        call=call,
    )


def _only_call(node: ast.stmt, under_test: set[str]) -> bytes | None:
    """Return the request of a test like ``assert candidate(1, [2]) == 3``, or None.

    Such a test makes exactly one call, with literal arguments. A wrong guess only costs a restart
    of the program, because the stand-in compares the calls.
    """
    if not isinstance(node, ast.Assert):
        return None
    nodes = list(ast.walk(node.test))
    calls = [
        n
        for n in nodes
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in under_test
    ]
    uncertain = ast.BoolOp | ast.IfExp | ast.Lambda | ast.comprehension
    if len(calls) != 1 or any(isinstance(n, uncertain) for n in nodes):
        return None
    try:
        arguments = [ast.literal_eval(argument) for argument in calls[0].args]
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in calls[0].keywords if k.arg}
        return wire.call(arguments, keywords)
    except (ValueError, TypeError, RecursionError, wire.Unsupported):
        return None


class _Recorder(ast.NodeTransformer):
    """Makes asserts record the values they compare: ``assert (actual := …) == (expected := …)``."""

    def __init__(self, under_test: set[str]) -> None:
        self.under_test = under_test

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:
        return node  # assignments in it would be local

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                swapped = self._mentions(right) and not self._mentions(left)
                names = (EXPECTED, ACTUAL) if swapped else (ACTUAL, EXPECTED)
                node.test.left = _keep(names[0], left)
                node.test.comparators = [_keep(names[1], right)]
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as operand):
                node.test.operand = _keep(ACTUAL, operand)
                node.test = _expecting(False, node.test)
            case ast.Call() as call:
                node.test = _expecting(True, _keep(ACTUAL, call))
        return node

    def _mentions(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.under_test for n in ast.walk(node))


def _keep(name: str, value: ast.expr) -> ast.expr:
    target = ast.copy_location(ast.Name(name, ast.Store()), value)
    return ast.copy_location(ast.NamedExpr(target, value), value)


def _expecting(value: bool, test: ast.expr) -> ast.expr:
    """Return ``[__expected__ := value] and test``: the list is always true."""
    expected = _keep(EXPECTED, ast.copy_location(ast.Constant(value), test))
    always_true = ast.copy_location(ast.List([expected], ast.Load()), test)
    return ast.copy_location(ast.BoolOp(ast.And(), [always_true, test]), test)
