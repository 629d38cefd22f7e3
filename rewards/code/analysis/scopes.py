"""Resolves names to variables by Python's scoping rules, from the syntax tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_SCOPES = Definition | ast.Lambda | ast.ClassDef | _COMPREHENSIONS


@dataclass(eq=False, slots=True, kw_only=True)
class Scope:
    """The names that a function, class, lambda or comprehension binds."""

    node: ast.AST
    parent: Scope | None
    bound: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Scope | None:
        """Return the scope that owns a name used in this scope, or None for the module."""
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
    """The resolved names in a statement of a module.

    ``variables`` maps each ``ast.Name``, parameter, function, class and capturing pattern to its
    variable: (scope, name), where the scope is None for the module.
    """

    def __init__(self, statement: ast.stmt) -> None:
        self._scopes: list[Scope] = []
        self._pending: list[tuple[ast.AST, str, Scope]] = []
        self._visited: set[ast.AST] = set()
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
        """The names of the module's variables that the statement reads."""
        return frozenset(
            name
            for node, (scope, name) in self.variables.items()
            if scope is None and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        """Collect the names of a node in a scope."""
        if node in self._visited:
            return
        self._visited.add(node)
        self._bind(node, scope)
        if isinstance(node, ast.NamedExpr):  # in a comprehension, it binds in the enclosing scope
            holder = scope
            while isinstance(holder.node, _COMPREHENSIONS) and holder.parent is not None:
                holder = holder.parent
            self._visit(node.target, holder)
        elif isinstance(node, _SCOPES):
            for child in _outside(node):
                self._visit(child, scope)
            scope = Scope(node=node, parent=scope)
            self._scopes.append(scope)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Name(id=name):
                self._pending.append((node, name, scope))
                if not isinstance(node.ctx, ast.Load):
                    scope.bound.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
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
            case _ if type(node).__name__ in ("TypeVar", "ParamSpec", "TypeVarTuple"):
                scope.bound.add(node.name)  # type: ignore[attr-defined]


def _outside(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a scope's node that are evaluated in the enclosing scope."""
    match node:
        case ast.ClassDef():
            return [*node.decorator_list, *node.bases, *node.keywords]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            parts = [*ast.iter_child_nodes(node.args)]  # parameters and defaults
            outside = [p.annotation if isinstance(p, ast.arg) else p for p in parts]
            if not isinstance(node, ast.Lambda):
                outside += [*node.decorator_list, node.returns]
            return [part for part in outside if part is not None]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return [node.generators[0].iter]
    return []
