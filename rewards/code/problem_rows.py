"""Validation of code-problem rows with the columns of HumanEval or MBPP, and their solutions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from comlrl.rewards.code import prompt_templates
from comlrl.rewards.code.analysis.parsing import UNPARSABLE, parse
from comlrl.rewards.sandbox.checks import TestError, imported, is_long, judge_has, split_check

COLUMNS = ("prompt", "test", "entry_point")
SOLUTIONS = ("canonical_solution", "solution", "code")  # columns that may hold a solution
MAX_BYTES = 1 << 20  # of each text in a row
_HELPER = re.compile(r"aux\d*")
_NOT_IN_PROGRAMS = frozenset({"ssl"})  # standard modules that programs cannot import


def checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with ``COLUMNS``, converted from MBPP's. Raises ValueError if it is unusable."""
    if not row.get("test") and _is_texts(row.get("test_list")):
        row = {**row, **_from_mbpp(row)}
    for column in COLUMNS:
        value = row.get(column)
        if not isinstance(value, str) or not value.strip():
            there = ", ".join(f"`{name}`" for name, value in row.items() if value is not None)
            raise ValueError(
                f"there is no text in its field `{column}`; the row's fields are {there or 'none'}"
            )
    prompt, entry_point = row["prompt"], row["entry_point"]
    if _HELPER.fullmatch(entry_point):
        raise ValueError(
            f"its `entry_point` '{entry_point}' is the name of a helper; rename the function"
        )
    _check_prompt(prompt, entry_point)
    prompt_templates.signature(prompt, entry_point)
    try:
        split_check(row["test"], entry_point)
    except TestError as error:
        raise TestError(f"{error}; fix its `test`") from None
    return row


def _check_prompt(prompt: str, entry_point: str) -> None:
    if re.search(rf"^async\s+def\s+{re.escape(entry_point)}\s*\(", prompt, re.MULTILINE):
        raise ValueError(
            f"its prompt contains `async def {entry_point}`, and tests await nothing; write `def`"
        )
    tree = parse(prompt, MAX_BYTES)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and is_long(node.value):
            raise ValueError(
                "its prompt holds an integer of thousands of digits; compute it instead"
            )
    for node in tree.body if tree else ():
        for module in imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if module == "numpy" or module in _NOT_IN_PROGRAMS or not judge_has(module):
                raise ValueError(
                    f"its prompt imports `{module}`, which programs cannot: they can import "
                    "Python's standard library; write the problem without it"
                )


def solution(row: Mapping[str, Any]) -> str | None:
    """Return a row's solution as a complete program, or None if it has none."""
    for column in SOLUTIONS:
        text = row.get(column)
        if isinstance(text, str) and text.strip():
            tree = parse(text, MAX_BYTES)
            names = [function.name for function in _functions(tree)] if tree else []
            return text if row["entry_point"] in names else row["prompt"] + text
    return None


def _from_mbpp(row: Mapping[str, Any]) -> dict[str, str]:
    """Return ``COLUMNS`` for a row in MBPP's format.

    Such a row has a problem in words (``text`` or ``prompt``), asserts in ``test_list`` and
    optionally ``code``. Raises ValueError, naming the field, if the row is unusable.
    """
    tests, code = row["test_list"], row.get("code")
    problem = row.get("text") or row.get("prompt")
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError("there is no text in its field `text`")
    tree = parse("\n".join(tests), MAX_BYTES)
    if tree is None:
        raise ValueError("its `test_list` does not compile; fix it")
    solved = parse(code, MAX_BYTES) if isinstance(code, str) else None
    functions = {f.name: f for f in _functions(solved)} if solved else {}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [called.id for called in calls if isinstance(called, ast.Name)]
    name = next((n for n in names if n in functions or not functions), None)
    if name is None:
        raise ValueError("its `test_list` calls no function of its `code`; fix either")
    imports, setup = row.get("test_imports"), row.get("test_setup_code")
    lines = [*imports] if _is_texts(imports) else []
    lines += [setup] if isinstance(setup, str) else []
    asserts = "".join(f"    {line}\n" for line in _written(tree).split("\n"))
    escaped = problem.strip().replace("\\", "\\\\").replace("'''", "\\'\\'\\'")
    head = _head(functions[name]) if functions else f"def {name}(*args):"
    return {
        "prompt": f"{head}\n    '''{escaped}\n    '''\n",
        "test": "".join(f"{line}\n" for line in lines) + f"def check(candidate):\n{asserts}",
        "entry_point": name,
    }


def _head(function: ast.FunctionDef) -> str:
    stub = ast.FunctionDef(
        name=function.name, args=function.args, body=[ast.Pass()], decorator_list=[], returns=None
    )
    return _written(ast.fix_missing_locations(stub)).split("\n")[0]


def _written(tree: ast.AST) -> str:
    try:
        return ast.unparse(tree)
    except UNPARSABLE as error:
        raise ValueError(f"its code cannot be written again: {error}") from None


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in tree.body if isinstance(node, ast.FunctionDef))


def _is_texts(value: Any) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, str) for item in value)
    )
