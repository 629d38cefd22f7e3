"""A task's ``check(candidate)`` → its tests, each with the set-up that runs before it.

Imports the standard library only: the process that runs the tests loads this file too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class TestError(ValueError):
    """A task whose tests cannot be used; the message names the row."""

    __test__ = False  # not a pytest class


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of ``check``'s body, or of the module around it (then never a test)."""

    node: ast.stmt
    is_test: bool
    in_check: bool
    names: frozenset[str]  # all that it mentions
    reads: frozenset[str]
    binds: frozenset[str]  # names that it binds or changes

    @property
    def source(self) -> str:
        return ast.unparse(self.node)


@dataclass(frozen=True, slots=True)
class Check:
    """A task's tests and set-up in the order in which they run."""

    parameter: str  # what ``check`` calls the function under test
    statements: tuple[Statement, ...]

    @property
    def tests(self) -> tuple[Statement, ...]:
        return tuple(s for s in self.statements if s.is_test)


@functools.lru_cache(maxsize=1024)
def split_check(test: str, entry_point: str) -> Check:
    """Tests and set-up of a source that defines ``check(candidate)``.

    A test is a top-level statement of ``check`` that asserts something and mentions the function
    under test: by ``check``'s parameter, by the entry point's name, or by a name that set-up
    bound from them. Calling a function that asserts is asserting. Everything else is set-up.
    Raises TestError.
    """
    found = parse_check(test, entry_point)
    _compile_all(found.statements)
    return found


def parse_check(test: str, entry_point: str) -> Check:
    """As ``split_check``, of nodes that nobody else has and that were not compiled."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestError(f"its test does not compile ({error})") from None
    checks = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if not checks:
        raise TestError("its test defines no `check(candidate)`")
    check = checks[-1]
    arguments = [*check.args.posonlyargs, *check.args.args]
    if not arguments:
        raise TestError("its `check` takes no argument")
    parameter = arguments[0].arg
    statements = _classify(tree, check, {parameter, "candidate", entry_point})
    if not any(statement.is_test for statement in statements):
        raise TestError(f"its `check` has no assert that mentions `{parameter}`")
    return Check(parameter, tuple(statements))


def _classify(tree: ast.Module, check: ast.FunctionDef, under_test: set[str]) -> list[Statement]:
    asserting: set[str] = set()  # functions that assert
    statements = []
    for node, in_check in _in_order(tree, check):
        nodes = list(ast.walk(node))
        mentioned = [n for n in nodes if isinstance(n, ast.Name)]
        names = frozenset(n.id for n in mentioned)
        reads = frozenset(n.id for n in mentioned if isinstance(n.ctx, ast.Load))
        mentions = not names.isdisjoint(under_test)
        asserts = any(isinstance(n, ast.Assert) for n in nodes)
        is_definition = isinstance(node, _DEFINITION)
        is_test = (
            in_check and mentions and not is_definition and (asserts or bool(names & asserting))
        )
        if isinstance(node, _DEFINITION) and asserts:
            asserting.add(node.name)
        binds = _binds(nodes)
        if mentions and not is_test:
            under_test |= binds
        statements.append(
            Statement(
                node=node, is_test=is_test, in_check=in_check, names=names, reads=reads, binds=binds
            )
        )
    return statements


def _in_order(tree: ast.Module, check: ast.FunctionDef) -> Iterable[tuple[ast.stmt, bool]]:
    """The module's statements, then those of ``check`` up to a return; calls of check left out."""
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"))):
                continue
        if node is not check:
            yield node, False
    for node in check.body:
        if isinstance(node, ast.Return):
            return
        yield node, True


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _binds(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that a statement binds or changes: ``x = …``, ``x[…] = …``, ``x.append(…)``."""
    bound: set[str] = set()
    for n in nodes:
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(n.name)
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            bound.add(n.id)
        elif isinstance(n, ast.Attribute | ast.Subscript) and isinstance(n.ctx, ast.Store):
            bound.add(_root(n) or "")
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
            bound.add(_root(n.func) or "")
        elif isinstance(n, ast.alias):
            bound.add(n.asname or n.name.partition(".")[0])
    return frozenset(bound - {""})


def _compile_all(statements: Iterable[Statement]) -> None:
    for statement in statements:
        module = ast.Module([statement.node], type_ignores=[])
        try:
            compile(module, "<check>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError) as error:
            reason = f"{error}: `{statement.source.splitlines()[0]}`"
            raise TestError(f"a statement of its `check` does not compile ({reason})") from None
