"""How main uses the helpers. Everything here is read from the syntax tree; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rewards.code.extraction import Function
from rewards.code.scopes import Definition, Names, Variable


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


MAX_ALIASES = 20  # of aliases of aliases


@dataclass(frozen=True, slots=True)
class MainUse:
    """How main uses the helpers."""

    called: tuple[str, ...] = ()  # or handed on as a value
    ignored: tuple[str, ...] = ()  # called as a bare statement, or into a name never read
    wrapper: bool = False  # main only hands on a helper's result


def main_use(main: Function, helpers: Sequence[str], support: Sequence[Function] = ()) -> MainUse:
    """Uses of the helpers in main's definition. A name that main binds itself is no helper.

    ``support``: other functions of main's text, which may bind a name of the module too.
    """
    if main.node is None or not any(
        isinstance(node, ast.Name) and node.id in helpers for node in ast.walk(main.node)
    ):
        return MainUse()
    names = Names(main.node)
    bound = names.module_bound.union(
        *(Names(f.node).module_bound for f in support if f.node is not None)
    )
    use = _Use(main.node, names, frozenset(helpers) - bound)
    called, ignored = use.called(), use.ignored()
    return MainUse(
        called=tuple(name for name in helpers if name in called),
        ignored=tuple(name for name in helpers if name in ignored),
        wrapper=use.is_wrapper(),
    )


def without_docstring(node: Definition) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


@dataclass(frozen=True, slots=True)
class _Flow:
    """A value and the variables that it goes to: none of a bare statement."""

    value: ast.expr
    targets: frozenset[Variable]


class _Use:
    def __init__(self, main: Definition, names: Names, helpers: frozenset[str]) -> None:
        self.main, self.names = main, names
        self.helpers: dict[Variable, str] = {(None, name): name for name in helpers}
        self.aliases: set[ast.expr] = set()  # values of ``g = aux``
        self._add_aliases()
        self.parents = {child: n for n in ast.walk(main) for child in ast.iter_child_nodes(n)}

    def _add_aliases(self) -> None:
        """``g = aux``: a variable that holds nothing but a helper is one."""
        stored: dict[Variable, list[ast.expr | None]] = {}
        for node in ast.walk(self.main):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                stored.setdefault(self.names.variables[node], []).append(None)
        pairs = [pair for n in ast.walk(self.main) if (pair := _plain(n)) is not None]
        for _ in pairs[:MAX_ALIASES]:
            for target, value in pairs:
                helper = self.helper(value)
                variable = self.names.variables[target]
                if helper is not None and len(stored[variable]) == 1 and variable[0] is not None:
                    self.helpers[variable] = helper
                    self.aliases.add(value)

    def helper(self, node: ast.AST) -> str | None:
        """The helper that an expression names."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self.helpers.get(self.names.variables[node])
        return None

    def calls_in(self, node: ast.AST) -> set[str]:
        """Helpers that are called in an expression."""
        calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
        return {name for function in calls if (name := self.helper(function)) is not None}

    def uses_in(self, node: ast.AST) -> set[str]:
        """Helpers that are called in an expression, or handed on there."""
        return {
            name for n in ast.walk(node) if (name := self.helper(n)) is not None and self._is_use(n)
        }

    def called(self) -> set[str]:
        return self.uses_in(self.main)

    def _is_use(self, node: ast.AST) -> bool:
        """Whether a helper is called here, or handed to what may call it."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.keyword):
            node, parent = parent, self.parents[parent]
        match parent:
            case ast.Call(func=function):
                return function is node or self._builtin(function) not in _LOOK
            case ast.List() | ast.Tuple() | ast.Dict() | ast.Set() | ast.Starred() | ast.IfExp():
                return not isinstance(self.parents.get(parent), ast.Expr)
            case ast.Return() | ast.Yield() | ast.arguments() | ast.Assign() | ast.For():
                return node not in self.aliases
            case ast.Lambda() | ast.comprehension() | ast.NamedExpr() | ast.BoolOp():
                return True
        return parent is self.main or isinstance(parent, Definition)  # a decorator

    def _builtin(self, function: ast.expr) -> str | None:
        """The name of a builtin that nothing in main takes the place of."""
        if isinstance(function, ast.Name) and self.names.variables[function][0] is None:
            return function.id
        return None

    def is_wrapper(self) -> bool:
        """``return …aux(…)…``, or ``x = aux(…)`` and ``return x``."""
        match without_docstring(self.main):
            case [ast.Return(value=ast.expr() as value)]:
                return bool(self.calls_in(value))
            case [
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=function)),
                ast.Return(value=ast.Name(id=returned)),
            ]:
                return name == returned and self.helper(function) is not None
        return False

    def ignored(self) -> set[str]:
        """Helpers with a use whose result is a bare statement's, or goes to names never read.

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

    def _flows(self) -> Iterator[_Flow]:
        for node in ast.walk(self.main):
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
        """One flow for each part of an assignment that can be told apart."""
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple | ast.List):
            pairs = _unpacked(targets[0].elts, value)
            if pairs is not None:
                for names, part in pairs:
                    yield from self._flow([names], part)
                return
        variables = [self._variables(target) for target in targets]
        if all(found is not None for found in variables):
            yield _Flow(value, frozenset(v for found in variables if found for v in found))

    def _variables(self, target: ast.expr) -> set[Variable] | None:
        """Local variables that a target is made of; None for one that lives elsewhere."""
        if isinstance(target, ast.Starred):
            return self._variables(target.value)
        if isinstance(target, ast.Tuple | ast.List):
            parts = [self._variables(element) for element in target.elts]
            return None if None in parts else {v for part in parts if part for v in part}
        if not isinstance(target, ast.Name):
            return None
        scope, _ = variable = self.names.variables[target]
        return None if scope is None or isinstance(scope.node, ast.ClassDef) else {variable}

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
        if self.helper(call.func) is not None:
            return False
        if isinstance(call.func, ast.Attribute):  # as a bare statement it is there for its effect
            return not flow.targets or call.func.attr in _KEEPS
        return self._builtin(call.func) not in _PURE

    def _read_in(self, value: ast.expr) -> Iterator[Variable]:
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield self.names.variables[node]

    def _lost_in(self, flow: _Flow) -> Iterator[str]:
        for node in self._kept_inside(flow):
            name = self.helper(node)
            if name is not None and self._is_use(node):
                yield name


def _plain(node: ast.AST) -> tuple[ast.Name, ast.Name] | None:
    """Target and value of ``g = aux``."""
    match node:
        case ast.Assign(targets=[ast.Name() as target], value=ast.Name() as value):
            return target, value
    return None


def _unpacked(
    targets: Sequence[ast.expr], value: ast.expr
) -> Iterable[tuple[ast.expr, ast.expr]] | None:
    """Each target with its own part of a tuple or list of values; None where none is told."""
    if not isinstance(value, ast.Tuple | ast.List) or any(
        isinstance(v, ast.Starred) for v in value.elts
    ):
        return None
    values = value.elts
    stars = [i for i, target in enumerate(targets) if isinstance(target, ast.Starred)]
    if not stars:
        return list(zip(targets, values, strict=True)) if len(targets) == len(values) else None
    rest = len(values) - len(targets) + 1
    if rest < 0:
        return None
    at = stars[0]
    middle = ast.List(values[at : at + rest], ast.Load())
    return [
        *zip(targets[:at], values[:at], strict=True),
        (targets[at], middle),
        *zip(targets[at + 1 :], values[at + rest :], strict=True),
    ]
