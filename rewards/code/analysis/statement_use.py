"""What one statement of main's text does with the functions that it knows: uses, wrappers, and
results that are lost."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewards.code.analysis.aliases import Aliases, unpacked
from rewards.code.analysis.scopes import Definition, Names, Variable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Calls that only look at an argument that is a function.
_LOOK = _words("print id str repr type isinstance hash bool callable format len hasattr getattr")
# Builtins without an effect: their value is all that there is to a call.
_PURE = _words(
    "abs all any ascii bin bool bytes chr complex dict divmod enumerate filter float format "
    "frozenset hash hex int isinstance iter len list map max min next oct ord pow range repr "
    "reversed round set slice sorted str sum tuple type zip"
)
# Methods that leave their arguments somewhere.
_KEEPS = _words(
    "add append appendleft extend extendleft insert put send setdefault update write writelines "
    "discard remove sort difference_update intersection_update symmetric_difference_update"
)


def without_docstring(node: Definition) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


@dataclass(frozen=True, slots=True)
class _Flow:
    """A value and the variables that it goes to: none of a bare statement."""

    value: ast.expr
    targets: frozenset[Variable]


class StatementUse:
    """What one statement of the module does with the functions that it knows.

    ``known``: names of helpers and functions of main's text, each with what it stands for;
    ``values``: other names that main's text binds; ``is_read``: whether others read a name of the
    module; ``pure``: whether the function of a name does nothing but give a result.
    """

    def __init__(
        self,
        node: ast.stmt,
        names: Names,
        known: Mapping[str, str],
        values: frozenset[str],
        is_read: Callable[[str], bool],
        pure: Callable[[str], bool],
    ) -> None:
        self.node, self.names, self.values = node, names, values
        self.is_read, self.pure = is_read, pure
        self.parents = {child: n for n in ast.walk(node) for child in ast.iter_child_nodes(n)}
        self.aliases = Aliases(node, names, self.parents, known)
        self.loaded = {
            variable for n, variable in names.variables.items() if isinstance(n.ctx, ast.Load)
        }
        self._called: set[str] | None = None

    # --- uses ----------------------------------------------------------------------------------

    def called(self) -> set[str]:
        if self._called is None:
            self._called = self.uses_in(self.node)
        return self._called

    def uses_in(self, node: ast.AST) -> set[str]:
        """Functions that are called in an expression, or handed on there; values read there."""
        return {name for n in ast.walk(node) for name in self._used(n)}

    def _used(self, node: ast.AST) -> Iterable[str]:
        """What is used at this very place."""
        if not isinstance(node, ast.Name):
            return ()
        if node in self.aliases.named:
            return self.aliases.named[node] if self._is_use(node) else ()
        scope, name = self.names.variables[node]
        is_value = scope is None and name in self.values and isinstance(node.ctx, ast.Load)
        return (name,) if is_value and not isinstance(self.parents[node], ast.Expr) else ()

    def _is_use(self, node: ast.AST) -> bool:
        """Whether a function is called here, or handed to what may call it."""
        stored = self.aliases.stored.get(node, [])  # type: ignore[call-overload]
        if any(map(self._read_by_others, stored)):
            return True
        carried = False  # in a tuple, a list or the like
        while (parent := self.parents.get(node)) is not None:
            match parent:
                case ast.Call(func=function):
                    return function is node or self._builtin(function) not in _LOOK
                case ast.Tuple() | ast.List() | ast.Dict() | ast.Set() | ast.Starred():
                    if stored and not carried:
                        return False
                    carried = True
                case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                    carried = True
                case ast.IfExp(test=test):
                    if test is node:
                        return False
                case ast.NamedExpr(target=target):
                    if carried and self.names.variables[target] in self.loaded:
                        return True
                case ast.keyword() | ast.BoolOp():
                    pass
                case ast.Subscript(value=inner):
                    if inner is not node or not carried:
                        return False
                case ast.Attribute():
                    if not carried:
                        return False
                case ast.Assign(targets=targets):
                    return any(self._is_stored(target, carried) for target in targets)
                case ast.AnnAssign(target=target, value=value):
                    return value is node and self._is_stored(target, carried)
                case ast.arguments():
                    return carried
                case ast.comprehension(iter=items) | ast.For(iter=items):
                    return items is node
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    return node in parent.decorator_list or node in getattr(parent, "bases", ())
                case _:
                    return isinstance(
                        parent, ast.Return | ast.Yield | ast.YieldFrom | ast.Lambda | ast.AugAssign
                    )
            node = parent
        return False

    def _is_stored(self, target: ast.expr, carried: bool) -> bool:
        """Whether what is assigned can be called from there; of a function itself, its aliases
        tell."""
        if isinstance(target, ast.Attribute | ast.Subscript):
            return True
        names = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
        variables = [self.names.variables[n] for n in names]
        return any(self._read_by_others(v) or (carried and v in self.loaded) for v in variables)

    def _read_by_others(self, variable: Variable) -> bool:
        scope, name = variable
        return scope is None and self.is_read(name)

    def _builtin(self, function: ast.expr) -> str | None:
        """The name of a builtin that nothing here takes the place of."""
        if isinstance(function, ast.Name) and self.names.variables[function][0] is None:
            return function.id
        return None

    # --- wrappers ------------------------------------------------------------------------------

    def handed_on(self) -> set[str]:
        """What ``return …aux(…)…``, or ``x = aux(…)`` and ``return x``, calls or hands on, if that
        is all that there is."""
        match self.node:
            case ast.Assign(value=ast.Lambda(body=value)):
                return self.uses_in(value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return self._returned(without_docstring(self.node))
        return set()

    def _returned(self, body: Sequence[ast.stmt]) -> set[str]:
        match body:
            case [ast.Return(value=ast.expr() as value)]:
                return self.uses_in(value)
            case [
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value),
                ast.Return(value=ast.Name(id=returned)),
            ] if name == returned:
                function = _inner(value.func) if isinstance(value, ast.Call) else value
                if function in self.aliases.named:
                    return set(self._used(function)) or set(self.aliases.named[function])
                return self._applied(_inner(value))
        return set()

    def _applied(self, value: ast.expr) -> set[str]:
        """What a call hands on to be called: ``next(map(aux, …))``."""
        found: set[str] = set()
        if isinstance(value, ast.Call) and _inner(value.func) not in self.aliases.named:
            for argument in [*value.args, *(keyword.value for keyword in value.keywords)]:
                inner = _inner(argument)
                named = inner in self.aliases.named
                found |= set(self._used(inner)) if named else self._applied(inner)
        return found

    # --- results that are lost -----------------------------------------------------------------

    def ignored(self) -> set[str]:
        """Functions with a use whose result is a bare statement's, or goes to names never read.

        A name that is read only to make the value of names never read is never read itself.
        """
        flows = list(self._flows())
        within = {node for flow in flows for node in self._kept_inside(flow)}
        live = {
            variable
            for node, variable in self.names.variables.items()
            if isinstance(node.ctx, ast.Load) and node not in within
        }
        into: dict[Variable, list[_Flow]] = {}
        for flow in flows:
            for variable in flow.targets:
                into.setdefault(variable, []).append(flow)
        pending = list(live)
        while pending:
            for flow in into.pop(pending.pop(), ()):
                fed = set(self._read_in(flow.value)) - live
                live |= fed
                pending += fed
        dead = [flow for flow in flows if not flow.targets & live]
        return {name for flow in dead for name in self._lost_in(flow)}

    def is_pure(self) -> bool:
        """Whether a function does nothing but give a result, or raise."""
        for node in ast.walk(self.node):
            match node:
                case ast.Global() | ast.Nonlocal() | ast.Import() | ast.ImportFrom() | ast.Await():
                    return False
                case ast.Attribute(ctx=ast.Store() | ast.Del()):
                    return False
                case ast.Subscript(ctx=ast.Store() | ast.Del()):
                    return False
                case ast.Expr(value=ast.Call(func=ast.Attribute())):
                    return False
                case ast.Call(func=ast.Attribute(attr=name)) if name in _KEEPS:
                    return False
                case ast.Call(func=ast.Name() as function) if function not in self.aliases.named:
                    if self._builtin(function) not in _PURE:
                        return False
        return True

    def gives(self, pure: Iterable[str]) -> bool:
        """Whether its result is all that there is to it."""
        return not isinstance(self.node, Definition) or self.node.name in pure

    def _flows(self) -> Iterator[_Flow]:
        for node in ast.walk(self.node):
            match node:
                case ast.Expr(value=ast.NamedExpr(target=target, value=value)):
                    yield from self._flow([target], value)
                case ast.Expr(value=ast.Await(value=value)) | ast.Expr(value=value):
                    if not isinstance(value, ast.Yield | ast.YieldFrom):
                        yield _Flow(value, frozenset())
                case ast.Assign(targets=targets, value=value):
                    yield from self._flow(targets, value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    yield from self._flow([target], value)
                case ast.AugAssign(target=target, value=value):
                    yield from self._flow([target], value)

    def _flow(self, targets: Sequence[ast.expr], value: ast.expr) -> Iterator[_Flow]:
        """One flow for each part of an assignment that can be distinguished."""
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple | ast.List):
            pairs = unpacked(targets[0].elts, value)
            if pairs is not None:
                for names, part in pairs:
                    yield from self._flow([names], part)
                return
        variables = [self._variables(target) for target in targets]
        if all(found is not None for found in variables):
            yield _Flow(value, frozenset(v for found in variables if found for v in found))

    def _variables(self, target: ast.expr) -> set[Variable] | None:
        """The variables that a target is made of; None where others may read what is there."""
        if isinstance(target, ast.Starred):
            return self._variables(target.value)
        if isinstance(target, ast.Tuple | ast.List):
            parts = [self._variables(element) for element in target.elts]
            return None if None in parts else {v for part in parts if part for v in part}
        if not isinstance(target, ast.Name):
            return None
        variable = self.names.variables[target]
        scope = variable[0]
        if self._read_by_others(variable) or (scope and isinstance(scope.node, ast.ClassDef)):
            return None
        return {variable}

    def _kept_inside(self, flow: _Flow) -> Iterator[ast.AST]:
        """The nodes of a value that nothing beside the value itself reads: not the arguments of a
        call that keeps or shows them."""
        pending: list[ast.AST] = [flow.value]
        while pending:
            node = pending.pop()
            yield node
            if not (isinstance(node, ast.Call) and self._has_effect(node, flow)):
                pending += ast.iter_child_nodes(node)

    def _has_effect(self, call: ast.Call, flow: _Flow) -> bool:
        function = _inner(call.func)
        if function in self.aliases.named:
            return not all(map(self.pure, self.aliases.named[function]))
        if isinstance(function, ast.Attribute):  # as a bare statement it is there for its effect
            return not flow.targets or function.attr in _KEEPS
        return self._builtin(function) not in _PURE

    def _read_in(self, value: ast.expr) -> Iterator[Variable]:
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield self.names.variables[node]

    def _lost_in(self, flow: _Flow) -> Iterator[str]:
        for node in self._kept_inside(flow):
            yield from self._used(node)


def _inner(node: ast.expr) -> ast.expr:
    """What ``(f := aux)`` or ``found[0]`` has inside."""
    while isinstance(node, ast.NamedExpr | ast.Subscript):
        node = node.value
    return node
