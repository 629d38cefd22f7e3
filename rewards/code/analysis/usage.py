"""How main uses the helpers. Everything here is read from the syntax tree; nothing is run.

Main is its own definition with all that it needs of its agent's text (``support``): what a
function there does with a helper, main does by calling it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rewards.code.analysis.extraction import Function, Setup
from rewards.code.analysis.scopes import Definition, Names
from rewards.code.analysis.statement_use import StatementUse


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
    """Uses of the helpers in main's definition. A name that main binds itself is not a helper.

    ``support``: the parts of its text that main needs. ``reads``: names of the module that the
    rest of the program reads.
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
        read_in = {node: found.module_reads for node, found in names.items()}
        counts = Counter(name for found in read_in.values() for name in found)

        def read_by_others(node: ast.stmt, name: str) -> bool:
            return name in reads or counts[name] > (name in read_in[node])

        self.statements = {
            node: StatementUse(
                node,
                names[node],
                known,
                values,
                partial(read_by_others, node),
                lambda name: name in helpers or name in self.pure,
            )
            for node in nodes
        }
        self.main = self.statements[nodes[0]]
        self.makers: dict[str, list[StatementUse]] = {}
        for node in nodes[1:]:
            for name in names[node].module_bound:
                self.makers.setdefault(name, []).append(self.statements[node])
        self.pure = {name for name, node in functions.items() if self.statements[node].is_pure()}

    def called(self) -> set[str]:
        return set(self._followed(self.main.called(), lambda use: use.called()))

    def is_wrapper(self) -> bool:
        """Main only hands on what a helper gives, or calls another of its functions that only
        does so."""
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
        self, names: Iterable[str], more: Callable[[StatementUse], Iterable[str]]
    ) -> Iterator[str]:
        """The helpers among names, and those that the statements that make the names lead to."""
        return (name for name in self._names(names, more) if name in self.helpers)

    def _names(
        self, names: Iterable[str], more: Callable[[StatementUse], Iterable[str]]
    ) -> set[str]:
        found: set[str] = set()
        pending = [*names]
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                for use in self.makers.get(name, ()):
                    pending += more(use)
        return found
