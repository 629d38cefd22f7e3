"""Removes statements of an agent's text that would replace another agent's function."""

from __future__ import annotations

import ast
import unicodedata
from dataclasses import replace

from comlrl.rewards.code.analysis.extraction import Function, Part
from comlrl.rewards.code.analysis.parsing import parse, written


def without_others(part: Part, others: frozenset[str]) -> Part | None:
    """Remove imports, definitions and assignments of the functions that other agents write.

    Return None if nothing is left.
    """
    source = unicodedata.normalize("NFKC", part.source)  # as the parser normalizes identifiers
    if part.node is None or not any(name in source for name in others):
        return part
    tree = parse(part.source + "\n")
    if tree is None:
        return part
    remover = _Remover(others)
    (left,) = remover.visit(tree).body
    if isinstance(left, ast.Pass):
        return None
    rest = written(ast.fix_missing_locations(left)) if remover.removed else None
    read = parse(rest) if rest is not None else None
    if read is None or rest is None:
        return part if isinstance(part, Function) or not remover.removed else None
    return replace(part, source=rest, node=read.body[0])  # type: ignore[arg-type]


class _Remover(ast.NodeTransformer):
    """Replaces module-level definitions and imports of the other agents' names with ``pass``."""

    def __init__(self, others: frozenset[str]) -> None:
        self.others, self.depth, self.removed = others, 0, False

    def _pass(self) -> ast.Pass:
        self.removed = True
        return ast.Pass()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        if not self.depth and node.name in self.others:
            return self._pass()
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._assigned(node, *node.targets)

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        return self._assigned(node, *node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.AugAssign) -> ast.AST:
        return self._assigned(node, node.target)

    visit_AugAssign = visit_AnnAssign  # type: ignore[assignment]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        value = node.value
        return self._assigned(node, value.target) if isinstance(value, ast.NamedExpr) else node

    def _assigned(self, node: ast.AST, *targets: ast.expr) -> ast.AST:
        names = [getattr(target, "id", None) for target in targets]
        return self._pass() if not self.depth and self.others.issuperset(names) else node

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST:
        """Remove ``from aux import aux`` and ``import aux``: the function is already defined.

        ``from aux import aux as helper`` becomes ``helper = aux``.
        """
        if isinstance(node, ast.ImportFrom) and node.module not in self.others:
            return node
        theirs = [alias for alias in node.names if alias.name in self.others]
        rest = (
            [] if isinstance(node, ast.ImportFrom) else [a for a in node.names if a not in theirs]
        )
        if not theirs and rest:
            return node
        self.removed = True
        renamed = next((alias for alias in theirs if alias.asname), None)
        if renamed is not None and not rest:
            target = ast.Name(str(renamed.asname), ast.Store())
            return ast.Assign([target], ast.Name(renamed.name, ast.Load()))
        node.names = rest
        return node if rest else self._pass()

    visit_ImportFrom = visit_Import  # type: ignore[assignment]
