"""Detects short definitions that take too long to compile, because the trainer compiles them."""

from __future__ import annotations

import ast

MAX_DEPTH = 150  # nesting of nodes, which functions on trees visit recursively
MAX_NODES = 50_000  # nodes that the compiler visits; it copies a ``finally`` for each exit
MAX_FOLDED = 200  # constants that it folds: up to 4 KiB each, and partial results are stored
MAX_CAPTURES = 256  # names in a pattern, which take the compiler quadratic time
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # Python 3.11
_EXITS = ast.Return | ast.Break | ast.Continue


class _TooMuch(Exception):
    pass


def is_excessive(definition: ast.AST) -> bool:
    """Return whether a definition is larger than any honest program needs."""
    sums: list[ast.BinOp] = []
    try:
        if _nodes(definition, MAX_DEPTH, sums) > MAX_NODES:
            return True
    except _TooMuch:
        return True
    folded = 0
    for node in sums:
        folded += _constants(node)
        if folded > MAX_FOLDED:
            return True
    return False


def _nodes(node: ast.AST, depth: int, sums: list[ast.BinOp]) -> int:
    """Count the nodes that the compiler visits below ``node``; append each BinOp to ``sums``."""
    if not depth:
        raise _TooMuch
    if isinstance(node, ast.match_case):
        captured = sum(isinstance(n, ast.MatchAs | ast.MatchStar) for n in ast.walk(node.pattern))
        if captured > MAX_CAPTURES:
            raise _TooMuch
    if isinstance(node, ast.BinOp):
        sums.append(node)
    counts = {child: _nodes(child, depth - 1, sums) for child in ast.iter_child_nodes(node)}
    copied = 0
    if isinstance(node, _TRIES) and node.finalbody:
        exits = sum(isinstance(n, _EXITS) for n in ast.walk(node))
        copied = (1 + exits) * sum(counts[child] for child in node.finalbody)
    return 1 + sum(counts.values()) + copied


def _constants(node: ast.AST) -> int:
    """Count the constants in a constant expression; return 0 for any other expression."""
    match node:
        case ast.Constant():
            return 1
        case ast.UnaryOp(operand=operand):
            return _constants(operand)
        case ast.BinOp(left=left, right=right):
            last = _constants(right)
            first = _constants(left) if last else 0
            return first + last if first else 0
        case ast.Tuple(elts=elements):
            counts = [*map(_constants, elements)]
            return sum(counts) if all(counts) else 0
    return 0
