"""Splits a task's ``check(candidate)`` into tests and the set-up that runs before them.

Imports only the standard library, because the process that runs the tests loads this file too.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LISTED = 3  # statements that a message shows
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
    names: frozenset[str]  # all names that it mentions
    reads: frozenset[str]
    binds: frozenset[str]  # names that it binds or changes

    @property
    def source(self) -> str:
        return ast.unparse(self.node)


@dataclass(frozen=True, slots=True)
class Check:
    """A task's tests and set-up in the order in which they run."""

    parameter: str  # the name of the function under test in ``check``
    statements: tuple[Statement, ...]
    in_place: bool  # no test reads a result, since the function changes its arguments

    @property
    def tests(self) -> tuple[Statement, ...]:
        return tuple(s for s in self.statements if s.is_test)


@functools.lru_cache(maxsize=1024)
def split_check(test: str, entry_point: str) -> Check:
    """Split a source that defines ``check(candidate)`` into tests and set-up.

    A test is a top-level statement of ``check`` that asserts something about the function under
    test. It mentions ``check``'s parameter, the entry point's name, a name that set-up bound from
    these, or a variable passed to a call whose result is discarded (``candidate(xs)`` changes
    ``xs``). Calling a function that asserts counts as asserting. Everything else is set-up. Raises
    TestError if there is no usable test.
    """
    check = parse_check(test, entry_point)
    _compile_all(check.statements)
    missing = [m for s in check.statements for m in imported(s.node) if not judge_has(m)]
    if missing:
        raise TestError(
            f"its test imports `{missing[0]}`, which tests cannot: they can import Python's "
            "standard library, and numpy if it is installed"
        )
    return check


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a tree imports, except optional ones (``try: import``)."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module).partition(".")[0]
        if not isinstance(node, ast.Try):
            pending += ast.iter_child_nodes(node)


@functools.cache
def judge_has(module: str) -> bool:
    """Return whether tests can import a module."""
    if module != "numpy":
        return module in sys.stdlib_module_names
    return importlib.util.find_spec(module) is not None


def parse_check(test: str, entry_point: str) -> Check:
    """Split as ``split_check`` does, but into new nodes, and without compiling them."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestError(f"its test does not compile ({error})") from None
    _refuse_long_integers(tree)
    checks = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if not checks:
        raise TestError(f"its test defines no `check(candidate)`; it holds {_listed(tree.body)}")
    check = checks[-1]
    arguments = [*check.args.posonlyargs, *check.args.args]
    if not arguments:
        raise TestError("its `check` takes no argument")
    parameter = arguments[0].arg
    statements, in_place = _classify(tree, check, {parameter, "candidate", entry_point})
    if not any(statement.is_test for statement in statements):
        raise TestError(
            f"its `check` contains no assert that mentions `{parameter}`; it holds "
            f"{_listed(check.body)}"
        )
    return Check(parameter, tuple(statements), in_place)


def _refuse_long_integers(tree: ast.AST) -> None:
    """Raise TestError for an integer that Python can parse but not print."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and is_long(node.value):
            raise TestError("its test holds an integer of thousands of digits; compute it instead")


def is_long(number: int) -> bool:
    """Return whether an integer has more digits than Python prints (4,300)."""
    try:
        str(number)
    except ValueError:
        return True
    return False


def _listed(body: Sequence[ast.stmt]) -> str:
    """List the first statements of a body, for a message."""
    heads = [_head(node)[:60] for node in body[:LISTED]]
    more = f" and {len(body) - LISTED} more statements" if len(body) > LISTED else ""
    return ", ".join(f"`{head}`" for head in heads) + more if heads else "nothing"


def _head(node: ast.stmt) -> str:
    """Return the first line of a statement, for a message."""
    try:
        return ast.unparse(node).split("\n")[0]
    except RecursionError:
        return f"a {type(node).__name__} statement"


def _classify(
    tree: ast.Module, check: ast.FunctionDef, under_test: set[str]
) -> tuple[list[Statement], bool]:
    """Return the statements in order, and whether no test reads a result of the function."""
    function = frozenset(under_test)
    results = set(function)  # names under test, except arguments that the function changes
    asserting: set[str] = set()  # functions that assert
    statements, reads_results = [], False
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
        dropped = [] if is_definition else _dropped_calls(nodes, function)
        changed = frozenset(root for call in dropped for root in _arguments(call))
        called = {id(call.func) for call in dropped}
        under_test |= changed
        if is_test:
            read = {n.id for n in mentioned if id(n) not in called}
            reads_results |= not read.isdisjoint(results)
        elif mentions:
            under_test |= binds
            results |= binds
            binds |= changed
        statements.append(
            Statement(
                node=node, is_test=is_test, in_check=in_check, names=names, reads=reads, binds=binds
            )
        )
    return statements, not reads_results


def _dropped_calls(nodes: Iterable[ast.AST], function: frozenset[str]) -> list[ast.Call]:
    """Return the calls of the tested function whose result is discarded or compared with None."""
    calls = []
    for node in nodes:
        match node:
            case (
                ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call)
                | ast.Compare(
                    left=ast.Call(func=ast.Name(id=name)) as call,
                    ops=[ast.Is() | ast.Eq()],
                    comparators=[ast.Constant(value=None)],
                )
            ) if name in function:
                calls.append(call)
    return calls


def _arguments(call: ast.Call) -> Iterator[str]:
    """Yield the variables that are passed to a call."""
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        if (root := _root(argument)) is not None:
            yield root


def _in_order(tree: ast.Module, check: ast.FunctionDef) -> Iterable[tuple[ast.stmt, bool]]:
    """Yield module statements except calls of ``check``, then ``check``'s body up to a return."""
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
    """Return the names bound or changed in nodes: ``x = …``, ``x[…] = …``, ``x.append(…)``."""
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
    """Check that every statement compiles and can be written as source, as the judge reads it."""
    for statement in statements:
        module = ast.Module([statement.node], type_ignores=[])
        try:
            compile(module, "<check>", "exec", dont_inherit=True)
            _ = statement.source
        except (SyntaxError, ValueError, RecursionError) as error:
            reason = f"{error}: `{_head(statement.node)}`"
            raise TestError(f"a statement of its `check` does not compile ({reason})") from None
