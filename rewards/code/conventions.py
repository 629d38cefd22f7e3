"""Detects the convention that an agent's code follows, from its syntax tree.

The conventions are those of ``problems``: test, transform, then, filter, map, filter_map, reduce.
They differ in the helper's parameter (an element, a result ``y`` or a collection) and in its return
value (a truth value, a collection or a single answer). Standard library only.
"""

from __future__ import annotations

import ast
import re

from comlrl.rewards.code.analysis.parsing import parse, written

_COLLECTIONS = frozenset({"d", "items", "out", "data"})  # in addition to names that end in s
_RESULT = "y"  # the name that a second map uses for the results of the first
_LOOPS = ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp


def convention(source: str, name: str = "aux") -> str | None:
    """Return the convention that the helper ``name`` in a text follows, or None if unclear."""
    function = _function(source, name)
    result = _returned(function) if function else None
    if function is None or result is None:
        return None
    parameters = [argument.arg for argument in function.args.args]
    if not parameters:
        return None
    if parameters == [_RESULT]:
        return "then"
    first = parameters[0]
    is_collection = first in _COLLECTIONS or (len(first) > 1 and first.endswith("s"))
    if len(parameters) > 1 or not is_collection:
        tests = isinstance(result, ast.Compare | ast.BoolOp) or (
            isinstance(result, ast.UnaryOp) and isinstance(result.op, ast.Not)
        )
        return "test" if tests else "transform"
    loop = _unwrapped(result)
    if not isinstance(loop, _LOOPS):
        return "reduce"
    filters = any(generator.ifs for generator in loop.generators)
    maps = _changes(loop)
    if filters:
        return "filter_map" if maps else "filter"
    return "map" if maps else None


def expected_convention(source: str, entry_point: str, stages: str | None = None) -> str | None:
    """Return the convention that main in a text expects of ``aux``, or None if unclear.

    ``stages`` is that column of a CoopMini row. It is needed where main uses a collection from aux
    unchanged: its code does not show whether aux should filter, map, or both.
    """
    function = _function(source, entry_point)
    if function is None or not _calls_aux(function):
        return None
    for loop in [node for node in ast.walk(function) if isinstance(node, _LOOPS)]:
        if any(_calls_aux(test) for generator in loop.generators for test in generator.ifs):
            return "test"
        values = [loop.key, loop.value] if isinstance(loop, ast.DictComp) else [loop.elt]
        second = written(loop.generators[0].target) == _RESULT
        if any(_calls_aux(value) for value in values):
            return "then" if second else "transform"
        if not second and any(_calls_aux(generator.iter) for generator in loop.generators):
            return "filter" if _changes(loop) or stages == "filter_reduce" else None
    result = _returned(function)
    if result is not None and _is_aux_call(result):
        return "map" if stages == "filter_map" else "reduce"
    by_stages = {"filter_reduce": "filter", "map_reduce": "map", "map_then_reduce": "map"}
    return by_stages.get(stages or "", "filter_map")


def _function(source: str, name: str) -> ast.FunctionDef | None:
    """Return the definition of ``name`` in a text, which may contain prose and fences, or None."""
    start = re.search(rf"^def {re.escape(name)}\s*\(", source, re.MULTILINE)
    if start is None:
        return None
    lines = source[start.start() :].split("\n")
    length = 1
    while length < len(lines) and (not lines[length].strip() or lines[length][0] in " \t"):
        length += 1
    tree = parse("\n".join(lines[:length]))
    definition = tree.body[0] if tree is not None else None
    return definition if isinstance(definition, ast.FunctionDef) else None


def _returned(function: ast.FunctionDef) -> ast.expr | None:
    """Return the first returned expression, or if that is a variable, the value assigned to it."""
    assigned: dict[str, ast.expr] = {}
    for statement in function.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            assigned[statement.targets[0].id] = statement.value
        if isinstance(statement, ast.Return):
            value = statement.value
            return assigned.get(value.id, value) if isinstance(value, ast.Name) else value
    return None


def _unwrapped(node: ast.expr) -> ast.expr:
    """Return the loop inside ``list(…)``, ``dict(…)`` or ``tuple(…)``, or the expression itself."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return node.args[0] if written(node.func) in ("list", "dict", "tuple") else node
    return node


def _changes(loop: _LOOPS) -> bool:
    """Return whether a loop yields something other than the elements that it iterates over."""
    target = (written(loop.generators[0].target) or "").strip("()")
    if isinstance(loop, ast.DictComp):
        return f"{written(loop.key)}, {written(loop.value)}" != target
    return (written(loop.elt) or "").strip("()") != target


def _is_aux_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "aux"


def _calls_aux(node: ast.AST) -> bool:
    return any(_is_aux_call(inner) for inner in ast.walk(node))
