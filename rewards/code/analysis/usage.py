"""Analysis of how main uses the helpers: results that nothing reads, and wrappers.

Calls of helpers are counted at run time, not here. The analysis ignores the order of statements: a
variable may hold any value that is bound to it anywhere.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from comlrl.rewards.code.analysis.scopes import Definition, Names, Variable


@dataclass(frozen=True, slots=True)
class MainUse:
    """Main's use of the helpers."""

    called: tuple[str, ...] = ()  # helpers that main mentions
    ignored: tuple[str, ...] = ()  # called as a bare statement, or assigned to a name never read
    wrapper: bool = False  # main only returns a helper's result


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Builtins that inspect a function passed to them, but do not call it.
_LOOK = _words("ascii bool callable dir format hash id isinstance len repr str type vars")
# Builtins without side effects, whose calls matter only for their value.
_PURE = _words(
    "abs all any ascii bin bool bytes chr complex dict divmod enumerate filter float format "
    "frozenset hash hex int isinstance iter len list map max min next oct ord pow range repr "
    "reversed round set slice sorted str sum tuple type zip"
)
# Methods that store their arguments, or change their object.
_KEEPS = _words(
    "add append appendleft extend extendleft insert put send setdefault update write writelines "
    "discard remove sort difference_update intersection_update symmetric_difference_update"
)
_SEQUENCES = ast.Tuple | ast.List | ast.Set

# How a name leads to a helper: it is the helper (IS), a function that only returns the helper's
# result (HANDS_ON), or the result of passing the helper to a call, such as ``partial(aux)``
# (MADE_OF). CALLED marks a step from a function to the result of its call.
IS, HANDS_ON, MADE_OF, CALLED = range(4)
Label = tuple[int, str]
Place = Variable | ast.AST  # a variable; or a function, for the values that it returns
Source = tuple[Place, int]  # a place, and how a value leads to it


def main_use(
    nodes: Sequence[ast.stmt],
    entry_point: str,
    helpers: Sequence[str],
    reads: frozenset[str] = frozenset(),
) -> MainUse:
    """Return how main's statements use the helpers. A name that main binds is not a helper.

    ``reads`` are the module's names that the rest of the program reads.
    """
    names = {node: Names(node) for node in nodes}
    relevant = _relevant(names, entry_point, frozenset(helpers))
    names = {node: names[node] for node in names if node in relevant}
    bound = frozenset().union(*(node_names.module_bound for node_names in names.values()))
    mentioned = frozenset().union(*(node_names.module_reads for node_names in names.values()))
    there = (mentioned - bound).intersection(helpers)
    if not there:
        return MainUse()
    program = _Program(names, entry_point, there, reads)
    ignored = program.ignored()
    return MainUse(
        called=tuple(name for name in helpers if name in there),
        ignored=tuple(name for name in helpers if name in ignored),
        # A wrapper only returns a helper's result, directly or through functions that do the same.
        wrapper=any(program.labels[node] for node in program.main),
    )


def _relevant(
    names: dict[ast.stmt, Names], entry_point: str, helpers: frozenset[str]
) -> set[ast.stmt]:
    """Return the statements on which the entry point depends.

    They are its definition, the statements that bind names it reads, and those that fill tables it
    reads. Examples and tests beside it are left out.
    """
    reads = {node: node_names.module_reads - helpers for node, node_names in names.items()}
    makers: dict[str, list[ast.stmt]] = defaultdict(list)
    readers: dict[str, list[ast.stmt]] = defaultdict(list)
    for node, node_names in names.items():
        for name in node_names.module_bound:
            makers[name].append(node)
        for name in reads[node]:
            readers[name].append(node)
    relevant: set[ast.stmt] = set()

    def reach(pending: list[ast.stmt]) -> None:
        while pending:
            node = pending.pop()
            if node not in relevant:
                relevant.add(node)
                pending += [maker for name in reads[node] for maker in makers.pop(name, ())]

    is_table = {
        name: any(isinstance(node, ast.Assign | ast.AnnAssign) for node in nodes)
        for name, nodes in makers.items()
    }
    reach([node for node in makers[entry_point] if isinstance(node, Definition)])
    seen = set(relevant)
    tables = [name for node in seen for name in reads[node] if is_table.get(name)]
    fill: list[ast.stmt] = []
    while tables:
        for node in readers.pop(tables.pop(), ()):
            if node not in seen:
                seen.add(node)
                fill.append(node)
                if isinstance(node, Definition):
                    tables.append(node.name)
    reach(fill)
    return relevant


class _Program:
    """Data flow in main's relevant statements.

    ``into`` lists the values that flow into a variable or out of a function. ``labels`` lists the
    helpers to which a variable leads.
    """

    def __init__(
        self,
        names: dict[ast.stmt, Names],
        entry_point: str,
        helpers: frozenset[str],
        reads: frozenset[str],
    ) -> None:
        self.variables: dict[ast.AST, Variable] = {}
        for node_names in names.values():
            self.variables |= node_names.variables
        self.helpers = helpers
        self.bound = frozenset().union(*(node_names.module_bound for node_names in names.values()))
        self.nodes = [node for statement in names for node in ast.walk(statement)]
        self.into: dict[Place, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            for variable, value in self._flows(node):
                self.into[variable].append(value)
        self.labels = self._labelled()
        self.main = [n for n in names if isinstance(n, Definition) and n.name == entry_point]
        self.live: set[Place] = set()
        self.needed: set[ast.AST] = set()  # expressions whose values something reads
        self.pending: list[Place] = [(None, name) for name in (*reads, entry_point)]
        self.pending += [v for v in self.into if isinstance(v, tuple) and _is_attribute(v)]

    # --- data flow -------------------------------------------------------------------------------

    def _flows(self, node: ast.AST) -> Iterator[tuple[Place, ast.AST]]:
        """Yield pairs of variables and values bound to them, and of functions and return values."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from self._matched(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from self._matched(target, value)
            case (
                ast.AugAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
            ):
                yield from self._matched(target, value)
            case ast.For(target=target, iter=items) | ast.comprehension(target=target, iter=items):
                for item in items.elts if isinstance(items, _SEQUENCES) else [items]:
                    yield from self._matched(target, item)
            case ast.Match(subject=subject, cases=cases):
                for pattern in (n for case in cases for n in ast.walk(case.pattern)):
                    if pattern in self.variables and not isinstance(pattern, ast.Name):
                        yield self.variables[pattern], subject
            case ast.arguments(defaults=defaults, kw_defaults=of_keywords):
                plain = [*node.posonlyargs, *node.args]
                pairs = [*zip(reversed(plain), reversed(defaults), strict=False)]
                for argument, default in [*pairs, *zip(node.kwonlyargs, of_keywords, strict=True)]:
                    if default is not None:
                        yield self.variables[argument], default
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield self.variables[node], node
                for inner in _own_statements(node.body):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield node, inner.value
            case ast.Lambda(body=body):
                yield node, body

    def _matched(self, target: ast.AST, value: ast.AST | None) -> Iterator[tuple[Place, ast.AST]]:
        match target:
            case ast.Name() if value is not None:
                yield self.variables[target], value
            case ast.Starred(value=inner):
                yield from self._matched(inner, value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for part, its in _unpacked(targets, value):
                    yield from self._matched(part, its)

    # --- helpers to which a name leads ---------------------------------------------------------

    def _labelled(self) -> dict[Place, set[Label]]:
        """Propagate the helpers to everything that is bound to a value derived from them."""
        ahead: dict[Place, list[tuple[Place, int]]] = defaultdict(list)
        for place, values in self.into.items():
            for value in values:
                sources = self._handed_on(place) if isinstance(place, ast.AST) else None
                for source, how in self._sources(value) if sources is None else sources:
                    ahead[source].append((place, how))
        labels: dict[Place, set[Label]] = defaultdict(set)
        pending: list[tuple[Place, Label]] = [((None, n), (IS, n)) for n in self.helpers]
        while pending:
            place, label = pending.pop()
            if label not in labels[place]:
                labels[place].add(label)
                for to, how in ahead[place]:
                    pending += [(to, further) for further in _steps(label, how)]
        return labels

    def _sources(self, value: ast.AST, how: int = IS) -> Iterator[Source]:
        """Yield the places whose values an expression may evaluate to or contain."""
        match value:
            case ast.Name(ctx=ast.Load()):
                yield self.variables[value], how
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield value, max(how, HANDS_ON)
            case ast.NamedExpr(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
                yield from self._sources(inner, how)
            case ast.ListComp(elt=inner) | ast.SetComp(elt=inner) | ast.GeneratorExp(elt=inner):
                yield from self._sources(inner, how)
            case ast.DictComp(value=inner):
                yield from self._sources(inner, how)
            case ast.IfExp(body=first, orelse=second):
                yield from self._sources(first, how)
                yield from self._sources(second, how)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                for part in parts:
                    yield from self._sources(part, how)
            case ast.BoolOp(values=parts) | ast.Dict(values=parts):
                for part in parts:
                    yield from self._sources(part, how)
            case ast.Call(args=arguments, keywords=keywords):
                for argument in [*arguments, *(keyword.value for keyword in keywords)]:
                    yield from self._sources(argument, max(how, MADE_OF))

    def _leads(self, value: ast.AST) -> Iterator[Label]:
        """Yield the helpers to which a value leads."""
        for source, how in self._sources(value):
            for label in self.labels[source]:
                yield from _steps(label, how)

    def _handed_on(self, function: ast.AST) -> Iterator[Source]:
        """Yield the sources of ``return …aux(…)…`` if this is all that the function does.

        ``x = aux(…)`` followed by ``return x`` counts as well.
        """
        body = [] if isinstance(function, ast.Lambda) else without_docstring(function.body)  # type: ignore[attr-defined]
        match body or function:
            case [ast.Return(value=ast.expr() as value)] | ast.Lambda(body=value):
                for node in ast.walk(value):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                        yield self.variables[node], HANDS_ON
                    elif isinstance(node, ast.Call):
                        yield from self._sources(node.func, CALLED)
            case [
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value),
                ast.Return(value=ast.Name(id=returned)),
            ] if name == returned:
                value = _inner(value)
                if isinstance(value, ast.Call):
                    yield from self._sources(value.func, CALLED)
                    yield from self._applied(value)
                else:
                    yield from self._sources(value, HANDS_ON)

    def _applied(self, value: ast.expr) -> Iterator[Source]:
        """Yield the functions passed to a call to be called by it: ``next(map(aux, …))``."""
        if isinstance(value, ast.Call):
            for argument in [*value.args, *(keyword.value for keyword in value.keywords)]:
                handed = _inner(argument)
                if isinstance(handed, ast.Name):
                    yield self.variables[handed], HANDS_ON
                else:
                    yield from self._applied(handed)

    # --- unused results ------------------------------------------------------------------------

    def ignored(self) -> set[str]:
        """Return the helpers that are called somewhere without anything reading the result.

        Such a call is a bare statement, or its result is assigned to names that are never read, or
        read only to compute values that are themselves unused.
        """
        for node in self.nodes:
            self._run(node)
        while self.pending:
            place = self.pending.pop()
            if place not in self.live:
                self.live.add(place)
                for value in self.into.get(place, ()):
                    self._need(value)
        calls = (n for n in self.nodes if isinstance(n, ast.Call) and n not in self.needed)
        return {name for call in calls for name in self._called_by(call)}

    def _called_by(self, call: ast.Call) -> Iterator[str]:
        for kind, name in self._leads(call.func):
            if kind != HANDS_ON:
                yield name
        if self._builtin(call.func) in _PURE - _LOOK:  # ``map(aux, …)``
            for argument in call.args:
                yield from (name for kind, name in self._leads(argument) if kind == IS)

    def _builtin(self, function: ast.expr) -> str | None:
        """Return the name of a builtin function that main does not shadow, or None."""
        if isinstance(function, ast.Name) and function.id not in self.bound:
            return function.id if self.variables[function][0] is None else None
        return None

    def _run(self, node: ast.AST) -> None:
        """Mark the values that a statement reads regardless of how its results are used."""
        match node:
            case ast.Expr(value=value):
                self._evaluate(value, bare=True)
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                self._assign([target], node.value)
            case ast.Return(value=value):
                self._evaluate(value)
            case ast.For(target=target, iter=items, body=body):
                self._assign([target], None)
                if isinstance(items, _SEQUENCES) or all(isinstance(n, ast.Pass) for n in body):
                    self._evaluate(items)
                else:
                    self._need(items)
            case ast.Match(
                subject=subject,
                cases=[ast.match_case(pattern=ast.MatchAs(pattern=None), guard=None)],
            ):
                self._evaluate(subject)
            case ast.Match(subject=subject, cases=cases):
                self._need(subject)
                for case in cases:
                    self._need(case.guard)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in node.decorator_list:
                    self._need(decorator)
                self._evaluate(node.args)
            case ast.Lambda(body=body):
                self._evaluate(body)
            case ast.stmt():
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr | ast.keyword | ast.withitem):
                        self._need(child)

    def _assign(self, targets: Sequence[ast.expr], value: ast.AST | None) -> None:
        """Handle an assignment to names, or to attributes and items, which others may read."""
        parts = [part for target in targets for part in _flat(target)]
        if any(isinstance(part, ast.Attribute | ast.Subscript) for part in parts):
            for target in targets:
                self._assign_part(target, value)
        self._evaluate(value)

    def _assign_part(self, target: ast.AST, value: ast.AST | None) -> None:
        match target:
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for part, its in _unpacked(targets, value):
                    self._assign_part(part, its)
            case ast.Attribute() | ast.Subscript():
                self._need(target)
                self._need(value)

    def _evaluate(self, node: ast.AST | None, bare: bool = False) -> None:
        """Mark the values that an expression reads even if unused: those that calls may store."""
        match node:
            case None | ast.Lambda():
                return
            case ast.Yield() | ast.YieldFrom():
                self._need(node)
            case ast.Call(func=function):
                builtin = self._builtin(function)
                if isinstance(function, ast.Attribute):
                    keeps = bare or function.attr in _KEEPS
                else:
                    is_helper = any(kind != HANDS_ON for kind, _ in self._leads(function))
                    keeps = not is_helper and builtin not in _PURE
                for child in ast.iter_child_nodes(node):
                    if child is function and isinstance(child, ast.Name | ast.Lambda):
                        continue
                    (self._need if keeps else self._evaluate)(child)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._evaluate(child)

    def _need(self, node: ast.AST | None) -> None:
        """Mark an expression's value as read."""
        if node is None or node in self.needed:
            return
        self.needed.add(node)
        match node:
            case ast.Name(ctx=ast.Load()):
                self.pending.append(self.variables[node])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self.pending.append(node)
            case ast.comprehension(iter=items):
                for test in node.ifs:
                    self._need(test)
                if not isinstance(items, _SEQUENCES):
                    self._need(items)
            case ast.Subscript(value=ast.Tuple() | ast.List() as items, slice=index):
                self._need(index)
                for item in _chosen(items.elts, index):
                    self._need(item)
            case ast.ClassDef():
                pass
            case _:
                for child in ast.iter_child_nodes(node):
                    self._need(child)


def _steps(label: Label, how: int) -> Iterator[Label]:
    kind, name = label
    if how == CALLED:
        yield HANDS_ON, name
    elif (kind, how) != (MADE_OF, HANDS_ON):
        yield max(kind, how), name


def _is_attribute(variable: Variable) -> bool:
    """Return whether a variable belongs to a class body, so that others read it as an attribute."""
    return variable[0] is not None and isinstance(variable[0].node, ast.ClassDef)


def _own_statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield all statements of a function except those in nested functions and classes."""
    pending = [*body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, Definition | ast.ClassDef | ast.expr):
            pending += ast.iter_child_nodes(node)


def without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """Return a function's statements without its docstring."""
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


def _inner(node: ast.expr) -> ast.expr:
    """Unwrap an expression: ``(f := aux)`` to ``aux``, ``values[0]`` to ``values``."""
    while isinstance(node, ast.NamedExpr | ast.Subscript):
        node = node.value
    return node


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _flat(part)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _chosen(items: Sequence[ast.expr], index: ast.expr) -> Sequence[ast.expr]:
    """Return the items that an index may select from a literal tuple or list."""
    try:
        position = ast.literal_eval(index)
        starred = any(isinstance(item, ast.Starred) for item in items)
        return items if starred or not isinstance(position, int) else [items[position]]
    except (ValueError, TypeError, IndexError):
        return items


def _unpacked(
    targets: Sequence[ast.expr], value: ast.AST | None
) -> Iterator[tuple[ast.expr, ast.AST | None]]:
    """Yield each target with its item of a literal tuple or list, or else with the whole value."""
    values = list(value.elts) if isinstance(value, ast.Tuple | ast.List) else []
    stars = [i for i, target in enumerate(targets) if isinstance(target, ast.Starred)]
    rest = len(values) - len(targets) + 1
    fits = rest >= 0 if stars else rest == 1
    if not values or not fits or any(isinstance(v, ast.Starred) for v in values):
        yield from ((target, value) for target in targets)
    elif stars:
        at = stars[0]
        yield from zip(targets[:at], values[:at], strict=False)
        yield from ((targets[at], item) for item in values[at : at + rest])
        yield from zip(targets[at + 1 :], values[at + rest :], strict=False)
    else:
        yield from zip(targets, values, strict=False)
