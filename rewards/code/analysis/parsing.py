"""Text that a model wrote → its syntax tree: the one parser of everything that reads such text.

A text has no tree where Python finds none in it, where it is longer than 64 KiB (deeper nesting
than fits in there has crashed Python's parser), and where the tree is nested so deeply that a
reader that calls itself at each level would not come back. Nothing here raises.
"""

from __future__ import annotations

import ast
import re
import warnings

from comlrl.rewards.code.analysis.excess import MAX_DEPTH

MAX_BYTES = 64 << 10
MAX_LEVELS = MAX_DEPTH + 10  # of a tree: a definition that is not excessive, and what is around it
TEXT_NAME = "<completion>"  # the file name under which completions are parsed
UNPARSABLE = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)

# Completions are full of invalid escapes and `is` with literals; their warnings help nobody.
warnings.filterwarnings("ignore", module=re.escape(TEXT_NAME))


def is_long(text: str, max_bytes: int = MAX_BYTES) -> bool:
    """Return whether a text is longer than the parser's limit."""
    return len(text) > max_bytes or len(text.encode("utf-8", "replace")) > max_bytes


def parse(source: str, max_bytes: int = MAX_BYTES) -> ast.Module | None:
    """Return the syntax tree, or None if the source does not parse."""
    if is_long(source, max_bytes):
        return None
    try:
        tree = ast.parse(source, TEXT_NAME)
    except UNPARSABLE:
        return None
    return None if _is_deep(tree) else tree


def _is_deep(tree: ast.AST) -> bool:
    level = [tree]
    for _ in range(MAX_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return False
    return True


def source_of(node: ast.stmt, lines: list[str], alone: bool = False) -> str | None:
    """Return a statement's source, or None if it cannot be reproduced.

    The source is the statement's lines if Python parses the same statement from them, and Python's
    unparsed form otherwise. None: that parses to another statement too.

    ``alone``: nothing else is in these lines.
    """
    cut = lines[first_line(node) - 1 : node.end_lineno]
    if alone and not getattr(node, "decorator_list", ()) and not cut[-1].endswith("\\"):
        return "\n".join(cut)
    for source in (_dedented(cut, node.col_offset), written(node)):
        tree = parse(source + "\n") if source is not None else None
        if tree is not None and _is_same(tree.body, [node]):
            return source
    return None


def _is_same(a: object, b: object) -> bool:
    """Compare trees; ``ast.dump`` raises ValueError for an integer of more than 4,300 digits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, ast.AST):
        return all(_is_same(getattr(a, f, None), getattr(b, f, None)) for f in a._fields)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a == b


def first_line(node: ast.stmt) -> int:
    """Return the first line of a statement, decorators included; 1-based."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _dedented(lines: list[str], columns: int) -> str:
    """Remove the indentation of the first line from all lines."""
    margin = lines[0][:columns]
    return "\n".join(line.removeprefix(margin) for line in lines)


def written(node: ast.AST) -> str | None:
    """Return a tree unparsed to source, or None if Python cannot."""
    try:
        return ast.unparse(node)
    except UNPARSABLE:  # an f-string that cannot be quoted, before Python 3.12
        return None
