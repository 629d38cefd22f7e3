"""How main uses the helpers. Everything here is read from the syntax tree; nothing is run.

Main is its own definition with all that it needs of its agent's text (``support``): what a
function there does with a helper, main does by calling it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewards.code.aliases import Aliases, unpacked
from rewards.code.extraction import Function, Setup
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


@dataclass(frozen=True, slots=True)
class MainUse:
    """How main uses the helpers."""

    called: tuple[str, ...] = ()  # or handed on as a value
    ignored: tuple[str, ...] = ()  # called as a bare statement, or into a name never read
    wrapper: bool = False  # main only hands on a helper's result


def main_use(
    main: Function,
    helpers: Sequence[str],
    support: Sequence[Function | Setup] = (),
    reads: frozenset[str] = frozenset(),
) -> MainUse:
    """Uses of the helpers in main's definition. A name that main binds itself is no helper.

    ``support``: what main needs of its own text. ``reads``: names of the module that the rest of
    the program reads.
    """
    if main.node is None:
        return MainUse()
    nodes = [main.node, *(part.node for part in support if part.node is not None)]
    names = {node: Names(node) for node in nodes}
    bound = Counter(name for found in names.values() for name in found.module_bound)
    there = frozenset(helpers) - bound.keys()
    if not any(there & found.of_module for found in names.values()):
        return MainUse()
    program = _Program(nodes, names, there, bound, reads)
    called, ignored = program.called(), program.ignored()
    return MainUse(
        called=tuple(name for name in helpers if name in called),
        ignored=tuple(name for name in helpers if name in ignored),
        wrapper=program.is_wrapper(),
    )


def without_docstring(node: Definition) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


class _Program:
    """Main's statements: its definition, the first, and what it needs."""

    def __init__(
        self,
        nodes: Sequence[ast.stmt],
        names: Mapping[ast.stmt, Names],
        helpers: frozenset[str],
        bound: Counter[str],
        reads: frozenset[str],
    ) -> None:
        self.helpers = helpers
        known = {name: name for name in helpers}
        for node in nodes:  # ``g = aux``, where g is nothing else
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
                    if value in known and bound[name] == 1:
                        known[name] = known[value]
        functions = {
            n.name: n for n in nodes[1:] if isinstance(n, Definition) and bound[n.name] < 2
        }
        known |= {name: name for name in functions if name not in known}
        values = frozenset(bound.keys() - known.keys())  # classes, constants
        counts = Counter(name for found in names.values() for name in found.module_reads)
        self.statements = {
            node: _Use(
                node,
                names[node],
                known,
                values,
                reads | {n for n in counts if counts[n] > (n in names[node].module_reads)},
                lambda name: name in helpers or name in self.pure,
            )
            for node in nodes
        }
        self.main = self.statements[nodes[0]]
        self.makers: dict[str, list[_Use]] = {}
        for node in nodes[1:]:
            for name in names[node].module_bound:
                self.makers.setdefault(name, []).append(self.statements[node])
        self.pure = {
            name for name, node in functions.items() if self.statements[node].is_pure(functions)
        }

    def called(self) -> set[str]:
        return set(self._followed(self.main.called(), lambda use: use.called()))

    def is_wrapper(self) -> bool:
        """Main only hands on what a helper gives, or what a function of its own does that only
        hands it on."""
        return any(self._followed(self.main.handed_on(), lambda use: use.handed_on()))

    def ignored(self) -> set[str]:
        """Helpers whose result is lost somewhere, there or with that of a function that gives it
        on and does nothing else."""
        reached = [self.main]
        for name in self._names(self.main.called(), lambda use: use.called()):
            reached += self.makers.get(name, ())
        lost = {name for use in dict.fromkeys(reached) for name in use.ignored()}
        return set(
            self._followed(lost, lambda use: use.called() if use.gives(self.pure) else set())
        )

    def _followed(
        self, names: Iterable[str], more: Callable[[_Use], Iterable[str]]
    ) -> Iterator[str]:
        """The helpers among names, and those that the statements that make the names lead to."""
        return (name for name in self._names(names, more) if name in self.helpers)

    def _names(self, names: Iterable[str], more: Callable[[_Use], Iterable[str]]) -> set[str]:
        found: set[str] = set()
        pending = [*names]
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                for use in self.makers.get(name, ()):
                    pending += more(use)
        return found


@dataclass(frozen=True, slots=True)
class _Flow:
    """A value and the variables that it goes to: none of a bare statement."""

    value: ast.expr
    targets: frozenset[Variable]


class _Use:
    """What one statement of the module does with the functions that it knows.

    ``known``: names of helpers and functions of main's text, each with what it stands for;
    ``values``: other names that main's text binds; ``reads``: names that others read; ``gives``:
    whether the function of a name does nothing but give a result.
    """

    def __init__(
        self,
        node: ast.stmt,
        names: Names,
        known: Mapping[str, str],
        values: frozenset[str],
        reads: frozenset[str],
        pure: Callable[[str], bool],
    ) -> None:
        self.node, self.names, self.values, self.reads, self.pure = node, names, values, reads, pure
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
                    return any(self._is_kept(target, carried) for target in targets)
                case ast.AnnAssign(target=target, value=value):
                    return value is node and self._is_kept(target, carried)
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

    def _is_kept(self, target: ast.expr, carried: bool) -> bool:
        """Whether what is assigned can be called from there; of a function itself, its aliases
        tell."""
        if isinstance(target, ast.Attribute | ast.Subscript):
            return True
        names = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
        variables = [self.names.variables[n] for n in names]
        return any(self._read_by_others(v) or (carried and v in self.loaded) for v in variables)

    def _read_by_others(self, variable: Variable) -> bool:
        scope, name = variable
        return scope is None and name in self.reads

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

    def is_pure(self, functions: Mapping[str, ast.stmt]) -> bool:
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
        """One flow for each part of an assignment that can be told apart."""
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
