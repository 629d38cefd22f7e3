"""Limits on a program's cost to the trainer: the size of its code, and memory for caches."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from comlrl.rewards.code.breakdown import SyntaxProblem

MAX_COMPILED = 1 << 20  # bytes of a program's marshalled code
SHORT = 4096  # characters up to which a program's names cannot become too long
MAX_NAMES = 8 << 20  # limit on ``written_out``
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def check_names(program: str) -> None:
    """Raise SyntaxError for a program whose names would become too long when compiled."""
    if len(program) > SHORT and written_out(ast.parse(program)) > MAX_NAMES:
        raise SyntaxError("names that are endless once compiled")


def written_out(tree: ast.Module) -> int:
    """Return an upper bound on the characters in the names that the compiler creates.

    The compiler prefixes private names with the class name, and qualifies functions and classes
    with all enclosing names: 5,000 of them in a class with a 30 KB name take 150 MB.
    """
    total = 0
    pending: list[tuple[ast.AST, int]] = [(tree, 0)]
    while pending:
        node, around = pending.pop()
        total += around
        if isinstance(node, _SCOPES):
            around += len(node.name)
        pending += [(child, around) for child in ast.iter_child_nodes(node)]
    return total


def bounded(code: bytes | SyntaxProblem) -> bytes | SyntaxProblem:
    """Return a program's code, or a SyntaxProblem if it is too large to run."""
    if isinstance(code, bytes) and len(code) > MAX_COMPILED:
        size = f"{len(code):,} bytes once compiled, more than {MAX_COMPILED:,}"
        return SyntaxProblem(f"a program of {size}", None, None)
    return code


class Memo:
    """Caches a function's most recently used results, up to a total weight of ``capacity``.

    ``weigh(arguments, result)`` returns the weight of a result.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        weigh: Callable[[tuple[Any, ...], Any], int],
        capacity: int,
    ) -> None:
        self._function, self._weigh, self._capacity = function, weigh, capacity
        self._cache: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.weight = 0  # of all cached results

    def __call__(self, *arguments: Any) -> Any:
        cached = self._cache.get(arguments)
        if cached is not None:
            self._cache.move_to_end(arguments)
            return cached[0]
        result = self._function(*arguments)
        weight = self._weigh(arguments, result)
        self._cache[arguments] = result, weight
        self.weight += weight
        while self.weight > self._capacity:
            self.weight -= self._cache.popitem(last=False)[1][1]
        return result
