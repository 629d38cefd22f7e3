"""Which names in a statement stand for a function of the module: ``g = aux``, then ``g(x)``.

A name that is bound anew no longer stands for it. That is read off the order of the lines: each
path through branches counts, a loop's body may run again, and a function within may run at any
time.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rewards.code.analysis.scopes import Names, Variable

MAX_AHEAD = 20  # rebindings that are looked at, after each alias
_LOOPS = ast.For | ast.AsyncFor | ast.While
_BLOCKS = ("body", "orelse", "finalbody")
_ONCE = ast.Assign | ast.AnnAssign | ast.Delete | ast.With | ast.AsyncWith | ast.Expr
Place = tuple[int, int]  # line, column
END = (1 << 60, 0)


@dataclass(slots=True)
class _Uses:
    """Where a variable is read and bound, in the text's order."""

    places: list[Place] = field(default_factory=list)  # of the reads
    reads: list[ast.Name] = field(default_factory=list)
    closures: list[ast.Name] = field(default_factory=list)  # reads in functions within
    bound: list[tuple[Place, Place, int]] = field(default_factory=list)  # from, to, in which block


class Aliases:
    """``named``: each name that may stand for some of ``known``, with their own names.

    ``stored``: the names among them that are the value of an alias, with the alias's variable.
    """

    def __init__(
        self,
        statement: ast.stmt,
        names: Names,
        parents: Mapping[ast.AST, ast.AST],
        known: Mapping[str, str],
    ) -> None:
        self.named: dict[ast.Name, set[str]] = defaultdict(set)
        self.stored: dict[ast.Name, list[Variable]] = defaultdict(list)
        self._names, self._parents = names, parents
        self._block = {child: id(body) for body in _bodies(statement) for child in body}
        self._uses = self._all_uses()
        pairs: dict[ast.Name, list[tuple[ast.expr | ast.arg, Variable]]] = defaultdict(list)
        for node in ast.walk(statement):
            for pair, value in self._pairs(node):
                for name in _passed_on(value):
                    pairs[name].append((pair, self._variable(pair)))
        pending = [
            (node, known[name])
            for node, (scope, name) in names.variables.items()
            if scope is None and name in known and isinstance(node.ctx, ast.Load)
        ]
        open_from: dict[tuple[Variable, str], Place] = {}  # from there on, all reads are known
        while pending:
            node, helper = pending.pop()
            if helper in self.named[node]:
                continue
            self.named[node].add(helper)
            for target, variable in pairs[node]:
                self.stored[node].append(variable)
                first, until = self._reach(target, node, variable)
                known_from = open_from.get((variable, helper), END)
                reads = self._reads(variable, first, min(until, known_from))
                pending += [(read, helper) for read in reads]
                if until == END and first < known_from:
                    open_from[variable, helper] = first

    def _variable(self, target: ast.expr | ast.arg) -> Variable:
        if isinstance(target, ast.arg):
            return self._names.parameters[target]
        assert isinstance(target, ast.Name)
        return self._names.variables[target]

    def _all_uses(self) -> dict[Variable, _Uses]:
        found: dict[Variable, _Uses] = defaultdict(_Uses)
        for node, variable in self._names.variables.items():
            uses = found[variable]
            if not isinstance(node.ctx, ast.Load):
                around = self._bound_by(node)
                if around is not None:
                    last = node if isinstance(around, ast.With | ast.AsyncWith) else around
                    uses.bound.append((_start(around), _end(last), self._block.get(around, 0)))
            elif node in self._names.closures:
                uses.closures.append(node)
            else:
                uses.reads.append(node)
        for definition, variable in self._names.definitions.items():
            place = _start(definition)
            found[variable].bound.append((place, place, self._block.get(definition, 0)))
        for uses in found.values():
            uses.reads.sort(key=_start)
            uses.places = [_start(read) for read in uses.reads]
            uses.bound.sort()
        return found

    def _bound_by(self, node: ast.AST) -> ast.stmt | None:
        """The statement that binds a name whenever it runs."""
        parent = self._parents[node]
        while isinstance(parent, ast.Tuple | ast.List | ast.Starred | ast.withitem | ast.NamedExpr):
            node, parent = parent, self._parents[parent]
        if isinstance(parent, ast.AnnAssign) and parent.value is None:
            return None
        return parent if isinstance(parent, _ONCE) else None

    def _reach(self, target: ast.AST, value: ast.Name, variable: Variable) -> tuple[Place, Place]:
        """From where to where a variable may hold what is bound to it here."""
        owner = variable[0].node if variable[0] is not None else None
        blocks: set[int] = set()
        loops: list[ast.AST] = []  # around it, the innermost first
        node: ast.AST | None = target
        if isinstance(target, ast.arg):
            blocks, node = {id(getattr(owner, "body", None))}, None
        while node is not None and node is not owner:
            if node in self._block:
                blocks.add(self._block[node])
            if isinstance(node, _LOOPS):
                loops.append(node)
            node = self._parents.get(node)
        bound = self._uses[variable].bound
        until, at = END, bisect_left(bound, (_end(value), END, 0))
        for start, end, block in bound[at : at + MAX_AHEAD]:
            if block in blocks:
                loops = [loop for loop in loops if not _start(loop) <= start <= _end(loop)]
                until = end
                break
        return min([_start(value), *map(_start, loops)]), until

    def _reads(self, variable: Variable, first: Place, until: Place) -> list[ast.Name]:
        uses = self._uses[variable]
        from_, to = (bisect_left(uses.places, place) for place in (first, until))
        return [*uses.closures, *uses.reads[from_:to]]

    def _pairs(self, node: ast.AST) -> Iterator[tuple[ast.Name | ast.arg, ast.expr]]:
        """Each name with the one value that is bound to it: ``g = aux``, ``g, h = aux, x``,
        ``(g := aux)``, ``def f(g=aux)``."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _matched(target, value)
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                yield target, value
            case ast.NamedExpr(target=target, value=value):
                yield target, value
            case ast.arguments(defaults=defaults, kw_defaults=of_keywords):
                plain = [*node.posonlyargs, *node.args]
                yield from zip(plain[len(plain) - len(defaults) :], defaults, strict=True)
                for argument, default in zip(node.kwonlyargs, of_keywords, strict=True):
                    if default is not None:
                        yield argument, default


def _matched(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target, value
    elif isinstance(target, ast.Tuple | ast.List):
        for part, its in unpacked(target.elts, value) or ():
            yield from _matched(part, its)


def _passed_on(value: ast.expr) -> Iterator[ast.Name]:
    """The names whose values an expression may have as its own."""
    match value:
        case ast.Name(ctx=ast.Load()):
            yield value
        case ast.NamedExpr(value=inner):
            yield from _passed_on(inner)
        case ast.IfExp(body=first, orelse=second):
            yield from _passed_on(first)
            yield from _passed_on(second)
        case ast.BoolOp(values=values):
            for each in values:
                yield from _passed_on(each)


def _bodies(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for node in ast.walk(statement):
        for name in _BLOCKS:
            body = getattr(node, name, None)
            if isinstance(body, list):
                yield body


def _start(node: ast.AST) -> Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def unpacked(
    targets: Sequence[ast.expr], value: ast.expr
) -> Iterable[tuple[ast.expr, ast.expr]] | None:
    """Each target with its own part of a tuple or list of values; None where they are unknown."""
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
