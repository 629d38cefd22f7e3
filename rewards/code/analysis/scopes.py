"""Which variable a name in a function means: Python's scopes, read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False, slots=True, kw_only=True)
class Scope:
    """The names that a function, class, lambda or comprehension binds."""

    node: ast.AST
    parent: Scope | None
    bound: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Scope | None:
        """Return the scope that owns a name used here, or None for the module."""
        scope: Scope | None = self
        while scope is not None and scope.parent is not None:
            if name in scope.globals:
                return None
            visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if visible and name in scope.bound and name not in scope.nonlocals:
                return scope
            scope = scope.parent
        return None


Variable = tuple[Scope | None, str]


class Names:
    """The names in a statement of a module, resolved.

    ``variables`` has those of every ``ast.Name``, parameter, function and class, and of what a
    pattern captures.
    """

    def __init__(self, statement: ast.stmt) -> None:
        self._scopes: list[Scope] = []
        self._pending: list[tuple[ast.AST, str, Scope]] = []
        module = Scope(node=ast.Module([], []), parent=None)
        self._visit(statement, module)
        self.variables: dict[ast.AST, Variable] = {
            node: (scope.owner(name), name) for node, name, scope in self._pending
        }
        self.module_bound = frozenset(
            module.bound.union(*(scope.globals & scope.bound for scope in self._scopes))
        )

    @property
    def module_reads(self) -> frozenset[str]:
        """Names of the module's variables that it reads."""
        return frozenset(
            name
            for node, (scope, name) in self.variables.items()
            if scope is None and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )

    def _visit(self, node: ast.AST, outer: Scope) -> None:
        """Read the names that a node binds in the enclosing scope."""
        if isinstance(node, _FUNCTIONS | ast.ClassDef | _COMPREHENSIONS):
            self._enter(node, outer)
            return
        if isinstance(node, ast.NamedExpr):  # in a comprehension it binds around that
            holder: Scope = outer
            while isinstance(holder.node, _COMPREHENSIONS) and holder.parent is not None:
                holder = holder.parent
            self._visit(node.target, holder)
            self._visit(node.value, outer)
            return
        self._bind(node, outer)
        if isinstance(node, ast.arg):  # its annotation belongs around the function
            return
        for child in ast.iter_child_nodes(node):
            self._visit(child, outer)

    def _enter(self, node: ast.AST, outer: Scope) -> None:
        scope = Scope(node=node, parent=outer)
        self._scopes.append(scope)
        if isinstance(node, Definition | ast.ClassDef):
            outer.bound.add(node.name)
            self._pending.append((node, node.name, outer))
        inside, outside = _split(node)
        for child in outside:
            self._visit(child, outer)
        for child in inside:
            self._visit(child, scope)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Name(id=name):
                self._pending.append((node, name, scope))
                if not isinstance(node.ctx, ast.Load):
                    scope.bound.add(name)
            case (
                ast.arg(arg=name)
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                self._pending.append((node, name, scope))
                scope.bound.add(name)
            case ast.alias(name=name, asname=asname):
                scope.bound.add(asname or name.partition(".")[0])
            case ast.Global(names=names):
                scope.globals.update(names)
            case ast.Nonlocal(names=names):
                scope.nonlocals.update(names)
            case ast.ExceptHandler(name=str(name)):
                scope.bound.add(name)
            case _ if type(node).__name__ in ("TypeVar", "ParamSpec", "TypeVarTuple", "TypeAlias"):
                scope.bound.add(getattr(node.name, "id", node.name))  # type: ignore[attr-defined,arg-type]


def _split(node: ast.AST) -> tuple[Iterator[ast.AST], Iterator[ast.AST]]:
    """Split a scope's children into those inside it and those of the enclosing scope."""
    outside: list[ast.AST] = []
    if isinstance(node, Definition):
        outside += node.decorator_list
        outside += _annotations(node)
    if isinstance(node, _FUNCTIONS):
        arguments = node.args
        outside += [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
    elif isinstance(node, ast.ClassDef):
        outside += [*node.decorator_list, *node.bases, *node.keywords]
    elif isinstance(node, _COMPREHENSIONS):
        outside.append(node.generators[0].iter)
    skipped = {id(child) for child in outside}
    return iter(_inner(node, skipped)), iter(outside)


def _annotations(node: Definition) -> Iterator[ast.expr]:
    arguments = node.args
    for each in (
        *arguments.posonlyargs,
        *arguments.args,
        arguments.vararg,
        *arguments.kwonlyargs,
        arguments.kwarg,
    ):
        if each is not None and each.annotation is not None:
            yield each.annotation
    if node.returns is not None:
        yield node.returns


def _inner(node: ast.AST, skipped: set[int]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments | ast.comprehension):
            yield from _inner(child, skipped)
        elif id(child) not in skipped:
            yield child
