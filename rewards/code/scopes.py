"""Which variable a name in a function means: Python's scopes, read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False, slots=True)
class Scope:
    """What one function, class, lambda or comprehension binds."""

    node: ast.AST
    parent: Scope | None
    bound: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Scope | None:
        """The scope whose variable a name here is; None: the module's."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.globals:
                return None
            visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if visible and name in scope.bound and name not in scope.nonlocals:
                return scope
            scope = scope.parent
        return None


Variable = tuple[Scope | None, str]


class Names:
    """A function's names, resolved: ``variable[node]`` of every ``ast.Name`` in it."""

    def __init__(self, function: Definition) -> None:
        self.variables: dict[ast.Name, Variable] = {}
        self._scopes: list[Scope] = []
        self._found: list[tuple[ast.Name, Scope]] = []
        self._visit(function, Scope(ast.Module([], []), None))
        self.module_bound = {
            name for scope in self._scopes for name in scope.globals & scope.bound
        }  # through `global`
        for name, scope in self._found:
            self.variables[name] = (scope.owner(name.id), name.id)

    def _visit(self, node: ast.AST, outer: Scope) -> None:
        """Reads what a node binds in the scope around it."""
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
        for child in ast.iter_child_nodes(node):
            self._visit(child, outer)

    def _enter(self, node: ast.AST, outer: Scope) -> None:
        scope = Scope(node, outer)
        self._scopes.append(scope)
        if isinstance(node, Definition | ast.ClassDef):
            outer.bound.add(node.name)
        inside, outside = _split(node)
        for child in outside:
            self._visit(child, outer)
        for child in inside:
            self._visit(child, scope)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Name():
                self._found.append((node, scope))
                if not isinstance(node.ctx, ast.Load):
                    scope.bound.add(node.id)
            case ast.arg(arg=name):
                scope.bound.add(name)
            case ast.alias(name=name, asname=asname):
                scope.bound.add(asname or name.partition(".")[0])
            case ast.Global(names=names):
                scope.globals.update(names)
            case ast.Nonlocal(names=names):
                scope.nonlocals.update(names)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                scope.bound.add(name)
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                scope.bound.add(name)
            case _ if type(node).__name__ in ("TypeVar", "ParamSpec", "TypeVarTuple", "TypeAlias"):
                scope.bound.add(getattr(node.name, "id", node.name))  # type: ignore[attr-defined,arg-type]


def _split(node: ast.AST) -> tuple[Iterator[ast.AST], Iterator[ast.AST]]:
    """A scope's children: those in it, and those that belong around it."""
    outside: list[ast.AST] = []
    if isinstance(node, Definition):
        outside += node.decorator_list
    if isinstance(node, _FUNCTIONS):
        arguments = node.args
        outside += [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]
    elif isinstance(node, ast.ClassDef):
        outside += [*node.decorator_list, *node.bases, *node.keywords]
    elif isinstance(node, _COMPREHENSIONS):
        outside.append(node.generators[0].iter)
    skipped = {id(child) for child in outside}
    return iter(_inner(node, skipped)), iter(outside)


def _inner(node: ast.AST, skipped: set[int]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments | ast.comprehension):
            yield from _inner(child, skipped)
        elif id(child) not in skipped:
            yield child
