"""Parses text that a model wrote; all analysis of such text uses this parser.

A text has no tree if Python cannot parse it, if it is longer than 64 KiB (longer ones can be nested
deeply enough to crash Python's parser), or if the tree is too deep for recursive functions. Nothing
here raises an error.
"""

from __future__ import annotations

import ast
import re
import warnings

from comlrl.rewards.code.analysis.excess import MAX_DEPTH

MAX_BYTES = 64 << 10
MAX_LEVELS = MAX_DEPTH + 10  # of a tree: the deepest allowed definition and the nodes around it
TEXT_NAME = "<completion>"  # the file name under which completions are parsed
UNPARSABLE = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)

# Completions often contain invalid escapes and `is` with literals; warnings about them are noise.
warnings.filterwarnings("ignore", module=re.escape(TEXT_NAME))


def is_long(text: str, max_bytes: int = MAX_BYTES) -> bool:
    """Return whether a text is longer than the parser's limit."""
    return len(text) > max_bytes or len(text.encode("utf-8", "replace")) > max_bytes


def parse(source: str, max_bytes: int = MAX_BYTES) -> ast.Module | None:
    """Return the syntax tree, or None if the source does not parse or exceeds a limit."""
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

    The source is the statement's lines if they parse to the same statement, otherwise the unparsed
    tree if that does. ``alone`` says that the lines contain nothing else.
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
    """Compare trees, as ``ast.dump`` would fail for an integer of more than 4,300 digits."""
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
    """Unparse a tree to source; return None if Python cannot."""
    try:
        return ast.unparse(node)
    except UNPARSABLE:  # an f-string that cannot be quoted, before Python 3.12
        return None
